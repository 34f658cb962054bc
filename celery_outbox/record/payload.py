"""Says which argument of a call cannot be serialized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from celery_outbox.exceptions import UnserializableArgument


def explain(
    task: str,
    serializer: str | None,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> UnserializableArgument:
    """The error for a call whose message could not be encoded; names the first culprit."""
    found = culprit(task, serializer, args, kwargs)
    if found is not None:
        return found
    return _error(task, "one of its options (link, chain, headers, ...)", None, serializer)


def culprit(
    task: str,
    serializer: str | None,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> UnserializableArgument | None:
    """The error for the first argument that cannot be encoded; ``None``: all of them can."""
    named = [(f"argument {index}", value) for index, value in enumerate(args or ())]
    named += [(f"argument {name!r}", value) for name, value in (kwargs or {}).items()]
    for name, value in named:
        if not _can_encode(value, serializer):
            return _error(task, name, value, serializer)
    return None


#: Containers in containers that are looked into; a circle has no end.
_DEPTH = 20


def _kind(value: Any, serializer: str | None) -> str:
    """The type of what cannot be encoded, inside whatever it is; neither keys nor values."""
    found = value
    for _ in range(_DEPTH):
        inner: Iterable[Any] = ()
        if isinstance(found, Mapping):
            inner = found.values()
        elif isinstance(found, (list, tuple)):
            inner = found
        bad = next((each for each in inner if not _can_encode(each, serializer)), None)
        if bad is None:
            break
        found = bad
    kind = type(found).__name__
    return kind if found is value else f"{kind}, inside a {type(value).__name__}"


def _can_encode(value: Any, serializer: str | None) -> bool:
    try:
        dumps(value, serializer=serializer)
    except EncodeError:
        return False
    return True


def _error(task: str, argument: str, value: Any, serializer: str | None) -> UnserializableArgument:
    kind = "signature or header" if value is None else _kind(value, serializer)
    return UnserializableArgument(
        task=task, argument=argument, kind=kind, serializer=serializer or "json"
    )
