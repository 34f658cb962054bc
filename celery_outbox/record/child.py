"""What a call in a body is recognized by when the body runs again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery import Celery
from kombu.serialization import dumps

from celery_outbox.context import RunningJob
from celery_outbox.core.child_id import fingerprint

#: What follows the called task: another call if it differs. When it is to run, and where, is not.
_FOLLOWED_BY = ("link", "link_error", "chain", "chord")


def derived_id(
    app: Celery,
    running: RunningJob,
    task: Any,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> str | None:
    """The id of a call that came without one; the same when another attempt makes it again.

    Arguments:
        running: the job whose body, or what follows it, makes the call.
        task: the one that is called.
        options: of the call.

    Returns:
        The id; ``None`` where the running task does not want it, or the call cannot be
        serialized: then Celery makes one up, or says what is wrong.
    """
    if not running.derives_child_ids:
        return None
    serializer = options.get("serializer") or task.serializer or app.conf.task_serializer
    follows = {name: options.get(name) for name in _FOLLOWED_BY}
    # A task with pydantic's types (Celery 5.5 and newer) is not called with what is sent.
    dump = getattr(task, "_dump_pydantic_arguments", None)
    try:
        if dump is not None and serializer != "pickle":
            args, kwargs = dump(tuple(args or ()), dict(kwargs or {}))
        parts = [
            _serialized([list(args or ()), dict(kwargs or {})], serializer),
            _serialized(follows, serializer),
        ]
    except Exception:  # serializers raise what they like; Celery meets it again, and explains it
        return None
    return running.child_id(fingerprint(task.name, *parts))


def _serialized(value: Any, serializer: str) -> bytes:
    *_, data = dumps(value, serializer=serializer)
    return data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
