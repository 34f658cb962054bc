"""Says which argument of a call cannot be serialized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        try:
            dumps(value, serializer=serializer)
        except EncodeError:
            return _error(task, name, value, serializer)
    return None


def _error(task: str, argument: str, value: Any, serializer: str | None) -> UnserializableArgument:
    kind = "signature or header" if value is None else type(value).__name__
    return UnserializableArgument(
        task=task, argument=argument, kind=kind, serializer=serializer or "json"
    )
