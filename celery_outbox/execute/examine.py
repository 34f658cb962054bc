"""Looks at a message before Celery does, which dies of what it does not expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timezone as utc_offset
from typing import Any, NamedTuple

from celery.utils.time import maybe_iso8601, maybe_make_aware, timezone
from kombu.asynchronous.timer import to_timestamp
from kombu.message import Message

from celery_outbox.core.classification import error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.execute.storable import is_storable
from celery_outbox.execute.unreadable import UNREADABLE_HEADER
from celery_outbox.store.schema import MAX_JOB_ID

#: Celery counts in its messages what is an INTEGER in the job's row.
MAX_RETRIES = 2**31 - 2


class Fault(NamedTuple):
    """Why no worker can run a message, and what exactly is wrong with it."""

    reason: Reason
    code: str


def examine(
    message: Message, is_known: Callable[[str], bool], is_guarded: Callable[[str], bool]
) -> Fault | None:
    """What is wrong with a message, if anything is.

    What stock Celery runs passes. A task with the outbox is looked at more closely, because its
    job is to be recorded.

    Arguments:
        is_known: whether this worker has a task of this name; of others it is not asked more.
        is_guarded: whether the task uses the outbox.
    """
    if not isinstance(message.headers, Mapping):
        return _malformed("headers")
    if UNREADABLE_HEADER in message.headers:
        return _malformed("properties")
    try:
        fields = message.headers if "task" in message.headers else message.decode()
    except Exception as error:  # decoders raise what they like
        return Fault(Reason.UNDECODABLE, error_code(error))
    # Without a header it is of Celery's first protocol: everything is in the body.
    name = fields.get("task") if isinstance(fields, Mapping) else None
    if not isinstance(name, str) or not name:
        return _malformed("task")
    if not is_known(name):
        return None
    try:
        payload = message.payload
    except Exception as error:  # decoders raise what they like
        return Fault(Reason.UNDECODABLE, error_code(error))
    guarded = is_guarded(name)
    return _examine_fields(fields, guarded) or _examine_payload(payload, guarded)


def _examine_fields(fields: Mapping[str, Any], guarded: bool) -> Fault | None:
    checks: dict[str, Callable[[Any], bool]] = {
        "timelimit": _is_time_limit,
        "eta": _is_moment,
        "expires": _is_moment,
        "shadow": lambda value: isinstance(value, str),
        "stamped_headers": _is_list_of_text,
        "stamps": lambda value: isinstance(value, Mapping),
    }
    if guarded:
        checks["retries"] = lambda value: isinstance(value, int) and 0 <= value <= MAX_RETRIES
    if not (is_storable(fields.get("id"), MAX_JOB_ID) if guarded else _is_id(fields)):
        return _malformed("id")
    for name, is_right in checks.items():
        value = fields.get(name)
        if value is not None and not is_right(value):
            return _malformed(name)
    return None


def _examine_payload(payload: Any, guarded: bool) -> Fault | None:
    if isinstance(payload, Mapping):
        # Celery's first protocol; what is missing has a default.
        args, kwargs = payload.get("args", ()), payload.get("kwargs", {})
        embed: Any = payload
    else:
        if not isinstance(payload, (list, tuple)) or len(payload) != 3:
            return _malformed("body")
        args, kwargs, embed = payload
    if embed is not None and not isinstance(embed, Mapping):
        return _malformed("body")
    if not guarded:
        return None
    if not isinstance(args, (list, tuple)):
        return _malformed("args")
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        return _malformed("kwargs")
    return _examine_embed(embed or {})


def _examine_embed(embed: Mapping[str, Any]) -> Fault | None:
    for name in ("callbacks", "errbacks", "chain"):
        signatures = embed.get(name)
        if signatures is None:
            continue
        if not isinstance(signatures, (list, tuple)):
            return _malformed(name)
        if not all(isinstance(signature, Mapping) for signature in signatures):
            return _malformed(name)
    chord = embed.get("chord")
    if chord is not None and not isinstance(chord, Mapping):
        return _malformed("chord")
    return None


def _malformed(what: str) -> Fault:
    return Fault(Reason.MALFORMED, f"{Reason.MALFORMED}:{what}")


def _is_id(fields: Mapping[str, Any]) -> bool:
    try:
        hash(fields["id"])
    except (KeyError, TypeError):
        return False
    return True


def _is_time_limit(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(limit is None or _is_duration(limit) for limit in value)
    )


def _is_duration(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _is_moment(value: Any) -> bool:
    try:
        moment = maybe_make_aware(maybe_iso8601(value))
        # What Celery and the database do with it.
        moment.astimezone(utc_offset.utc)
        to_timestamp(timezone.to_system(moment))
    except Exception:  # parsers and time zones raise what they like
        return False
    return True


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
