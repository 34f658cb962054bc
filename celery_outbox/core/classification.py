"""Tells errors that may pass from errors that will not."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from celery_outbox.core.reasons import Reason
from celery_outbox.exceptions import OutboxError, PermanentError, RetryableError

#: What a ``classify`` hook may answer; ``None`` leaves the decision to the defaults.
Answer = Literal["permanent", "retryable"] | None
ClassifyHook = Callable[[BaseException], Answer]

#: Programming and validation errors: the same input fails the same way again.
PERMANENT_TYPES: tuple[type[BaseException], ...] = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
    AssertionError,
    ImportError,
    NotImplementedError,
    SyntaxError,
)

#: HTTP client errors that may pass: timeout, too early, too many requests
#: (RFC 9110 section 15.5.9, RFC 8470 section 5.2, RFC 6585 section 4).
RETRYABLE_CLIENT_STATUS = frozenset({408, 425, 429})

#: The longest error code that is stored, in characters.
MAX_ERROR_CODE = 200

#: No server is believed that asks for a longer pause than this, in seconds.
MAX_RETRY_AFTER = 24 * 3600.0


#: The longest pause that a task can ask for itself, in seconds: a year.
MAX_PAUSE = 366 * 24 * 3600.0


@dataclass(frozen=True)
class Verdict:
    """What an error means for its job.

    Attributes:
        permanent: no further attempt would help.
        error_code: a stable name of the error, without any of its text.
        retry_after: seconds that the other side asked to wait, if it did.
        reason: the quarantine reason, where it is not the ordinary one.
    """

    permanent: bool
    error_code: str
    retry_after: float | None = None
    reason: Reason | None = None


def error_code(error: BaseException) -> str:
    """The stable name of an error: its class, and the HTTP status where it has one. An ``OSError``
    that Python has no class for has the name of its number: ``OSError:ENOSPC`` is a full disk.

    The text of the error is left out: it may hold arguments and personal data.
    """
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    status = http_status(error)
    if status is not None:
        name = f"{name}:{status}"
    elif kind is OSError and error.errno in errno.errorcode:  # type: ignore[attr-defined]
        name = f"{name}:{errno.errorcode[error.errno]}"  # type: ignore[attr-defined]
    return re.sub(r"[^\w.:<>\-]", "_", name)[:MAX_ERROR_CODE]


def http_status(error: BaseException) -> int | None:
    """The HTTP status that an error carries, for the error classes of common clients.

    Known by their shape: ``error.response.status_code`` (requests, httpx),
    ``error.status`` (aiohttp) and ``error.code`` (urllib).
    """
    if not isinstance(error, Exception):
        # The code of SystemExit is a process's.
        return None
    response = _attribute(error, "response")
    candidates = (
        _attribute(response, "status_code"),
        _attribute(response, "status"),
        _attribute(error, "status"),
        _attribute(error, "code"),
    )
    for status in candidates:
        if isinstance(status, int) and not isinstance(status, bool) and 100 <= status <= 599:
            return status
    return None


def retry_after(error: BaseException, now: datetime) -> float | None:
    """Seconds to wait that an HTTP answer asked for (RFC 9110 section 10.2.3), if it did.

    Arguments:
        now: an aware datetime, against which an HTTP date is measured.
    """
    value = _header(error, "Retry-After")
    if value is None:
        return None
    text = str(value).strip()
    if text.isascii() and text.isdigit():
        # Bounded before it becomes a float: the header is foreign input.
        return min(float(text[:10]), MAX_RETRY_AFTER)
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=timezone.utc)
    return min(max((at - now).total_seconds(), 0.0), MAX_RETRY_AFTER)


def _bounded(seconds: float) -> float:
    """A pause that a date can be moved by; NaN is none."""
    return min(max(seconds, 0.0), MAX_PAUSE) if seconds == seconds else 0.0


def _header(error: BaseException, name: str) -> Any:
    for holder in (_attribute(error, "response"), error):
        get = _attribute(_attribute(holder, "headers"), "get")
        if not callable(get):
            continue
        try:
            value = get(name)
            value = get(name.lower()) if value is None else value
        except Exception:  # foreign objects raise what they like
            continue
        if value is not None:
            return value
    return None


def _attribute(holder: Any, name: str) -> Any:
    """An attribute of a foreign object, whose properties may raise anything."""
    try:
        return getattr(holder, name, None)
    except Exception:  # httpx, for one, raises RuntimeError
        return None


def classify(
    error: BaseException,
    *,
    now: datetime,
    permanent_for: tuple[type[BaseException], ...] = (),
    retry_for: tuple[type[BaseException], ...] = (),
    hook: ClassifyHook | None = None,
) -> Verdict:
    """Decide whether ``error`` may pass.

    Asked in this order: the hook, :class:`~celery_outbox.PermanentError` and
    :class:`~celery_outbox.RetryableError`, the task's two lists (the class nearer to the
    error's own wins), the HTTP status, the default list; what none of them knows may pass.

    Arguments:
        now: an aware datetime, for a ``Retry-After`` date.
        permanent_for: error classes that will not pass.
        retry_for: error classes that may pass.
        hook: the task's own ``classify``; answers ``"permanent"``, ``"retryable"`` or ``None``.

    Raises:
        ValueError: the hook answered something else.
    """
    code = error_code(error)
    wait = retry_after(error, now)
    if isinstance(error, RetryableError) and error.retry_after is not None:
        wait = _bounded(error.retry_after)
    permanent = _is_permanent(error, permanent_for, retry_for, hook)
    if permanent:
        return Verdict(True, code)
    reason = Reason.TIME_LIMIT if _is_time_limit(error) else None
    return Verdict(False, code, retry_after=wait, reason=reason)


def _is_permanent(
    error: BaseException,
    permanent_for: tuple[type[BaseException], ...],
    retry_for: tuple[type[BaseException], ...],
    hook: ClassifyHook | None,
) -> bool:
    answer = hook(error) if hook is not None else None
    if answer is not None:
        if answer not in ("permanent", "retryable"):
            raise ValueError(
                f"classify must answer 'permanent', 'retryable' or None, not {answer!r}"
            )
        return answer == "permanent"
    if isinstance(error, (PermanentError, OutboxError)):
        return True
    if isinstance(error, RetryableError):
        return False
    for kind in type(error).__mro__:
        if kind in permanent_for:
            return True
        if kind in retry_for:
            return False
    status = http_status(error)
    if status is not None:
        return 400 <= status <= 499 and status not in RETRYABLE_CLIENT_STATUS
    if isinstance(error, PERMANENT_TYPES):
        return True
    # Django's and marshmallow's validation errors derive from Exception alone.
    return any(kind.__name__ == "ValidationError" for kind in type(error).__mro__)


def _is_time_limit(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"SoftTimeLimitExceeded", "TimeLimitExceeded"})
