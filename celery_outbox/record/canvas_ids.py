"""Ids for the members of a canvas that a body calls: the same in each attempt that calls it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import celery
from celery import canvas
from celery.utils.functional import _regen
from kombu.serialization import dumps

from celery_outbox.context import running_job
from celery_outbox.core.child_id import fingerprint, member_id

_INSTALLED = "_celery_outbox_ids"

#: Of the call, what makes it another one; when and where it runs does not.
_PART_OF_IT = ("args", "kwargs", "body", "link", "link_error", "chord", "group_id", "task_id")

_ids: ContextVar[Iterator[str] | None] = ContextVar("outbox_canvas_ids", default=None)


def install() -> None:
    """Let the canvases of this process ask here for ids; safe to repeat.

    Celery makes all ids of a canvas with one function while it calls it, and in an order that the
    canvas alone decides. So they are numbered behind an id of the whole canvas, of which all that
    it holds is a part: an id never stands for another member.
    """
    if hasattr(canvas.uuid, _INSTALLED):
        return
    stock = canvas.uuid

    def next_id() -> str:
        ids = _ids.get()
        return stock() if ids is None else next(ids)

    setattr(next_id, _INSTALLED, True)
    canvas.uuid = next_id
    for kind in (canvas.group, canvas._chain, canvas._chord):
        kind.apply_async = _with_ids(kind.apply_async)
    # What receivers of Celery's signals make while a single task is sent has no number.
    for kind in (canvas.Signature, canvas._basemap):
        kind.apply_async = _without_ids(kind.apply_async)


def _with_ids(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        if _ids.get() is not None:
            return call(self, *args, **options)
        with _numbered(_id_of(self, args, options)):
            return call(self, *args, **options)

    return apply_async


def _without_ids(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def apply_async(self: Any, *args: Any, **options: Any) -> Any:
        with _numbered(None):
            return call(self, *args, **options)

    return apply_async


@contextmanager
def _numbered(whole: str | None) -> Iterator[None]:
    ids = None if whole is None else (member_id(whole, number) for number in itertools.count())
    token = _ids.set(ids)
    try:
        yield
    finally:
        _ids.reset(token)


def _id_of(signature: Any, args: Any, options: Mapping[str, Any]) -> str | None:
    """An id for a whole canvas; ``None`` where it has none, and Celery's random ids stay."""
    running = running_job.get()
    if running is None or not running.derives_child_ids or _is_lazy(signature):
        return None
    more = {name: options[name] for name in _PART_OF_IT if options.get(name) is not None}
    serializer = signature.app.conf.task_serializer
    try:
        *_, data = dumps([signature, list(args), more], serializer)
    except Exception:  # serializers raise what they like; Celery meets it again, and explains it
        return None
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    # Another version may ask for the ids in another order.
    return running.child_id(fingerprint(f"canvas {celery.__version__}", raw))


def _is_lazy(value: Any) -> bool:
    """Whether part of a canvas comes out of a generator, which is not run before its time."""
    if isinstance(value, _regen):
        return True
    if isinstance(value, Mapping):
        return any(_is_lazy(each) for each in value.values())
    return isinstance(value, (list, tuple)) and any(_is_lazy(each) for each in value)
