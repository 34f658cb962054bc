"""Groups and chords are recorded as one, where they come with no transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Protocol

from celery import Celery, group
from celery.canvas import _chord
from celery.utils.functional import _regen

_INSTALLED = "_celery_outbox"


class Together(Protocol):
    """Makes the block that the calls of one canvas are made in."""

    def __call__(self, app: Celery, *, lazy: bool, began: float) -> AbstractContextManager[None]:
        """A block of an app, which may have no outbox.

        Arguments:
            lazy, began: see :class:`~celery_outbox.record.batch.Batch`.
        """


def install(app: Celery, together: Together) -> None:
    """Call the groups and chords of this process in blocks; safe to repeat.

    Celery has no other place that knows where a group begins and ends: applications use its
    classes themselves. Apps without an outbox are left alone.

    Arguments:
        app: the app whose producers are taken when something is really sent.
        together: makes a block.
    """
    _lend_producers_later(app)
    if hasattr(group.apply_async, _INSTALLED):
        return
    call_group, call_chord = group.apply_async, _chord.apply_async

    @wraps(call_group)
    def apply_group(self: Any, *args: Any, **options: Any) -> Any:
        # Celery finds the app in the first task, for which the generator may take its time.
        began = time.monotonic()
        with together(self.app, lazy=is_lazy(self), began=began):
            return call_group(self, *args, **options)

    @wraps(call_chord)
    def apply_chord(self: Any, *args: Any, **options: Any) -> Any:
        began = time.monotonic()
        app = self._get_app(self.kwargs.get("body"))
        with together(app, lazy=is_lazy(self), began=began):
            return call_chord(self, *args, **options)

    setattr(apply_group, _INSTALLED, True)
    group.apply_async, _chord.apply_async = apply_group, apply_chord


def is_lazy(signature: Any) -> bool:
    """Whether tasks of a canvas come out of a generator, which may take its time."""
    if isinstance(signature, _regen):
        return True
    if isinstance(signature, (list, tuple)):
        return any(is_lazy(each) for each in signature)
    if not isinstance(signature, Mapping) or not signature.get("subtask_type"):
        return False
    kwargs = signature.get("kwargs") or {}
    return is_lazy(kwargs.get("tasks")) or is_lazy(kwargs.get("header"))


def _lend_producers_later(app: Celery) -> None:
    stock = app.producer_or_acquire
    if hasattr(stock, _INSTALLED):
        return

    def producer_or_acquire(producer: Any = None) -> Any:
        return stock(producer) if producer is not None else _acquired(stock)

    setattr(producer_or_acquire, _INSTALLED, True)
    app.producer_or_acquire = app.default_producer = producer_or_acquire


@contextmanager
def _acquired(stock: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    with ExitStack() as stack:
        yield _LaterProducer(lambda: stack.enter_context(stock()))


class _LaterProducer:
    """Takes a producer out of the pool when something is really sent: none may be free, and tasks
    of the outbox need none."""

    def __init__(self, acquire: Callable[[], Any]) -> None:
        self._acquire = acquire
        self._acquired: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._acquired is None:
            self._acquired = self._acquire()
        return getattr(self._acquired, name)
