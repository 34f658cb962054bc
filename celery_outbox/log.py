"""Log records with a stable event name and fields; never arguments, results or secrets."""

from __future__ import annotations

import logging
from typing import Any


def cause(error: BaseException) -> str:
    """An error of the database, the broker or this package in one line: what an operator needs.

    Only the first line of what the driver says: statements and parameters come after it.
    """
    text = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
    return f"{type(error).__name__} ({text[:300]})" if text else type(error).__name__


def log_event(
    logger: logging.Logger, level: int, name: str, *, exc_info: bool = False, **fields: Any
) -> None:
    """Log one event.

    The message is the name followed by ``field=value``, for people; the record has the
    attributes ``outbox_event`` and ``outbox_<field>``, for structured logs.

    Arguments:
        level: a level of :mod:`logging`.
        name: the stable name of the event.
        exc_info: append the traceback of the error that is being handled.
        fields: what happened to whom.
    """
    if not logger.isEnabledFor(level):
        return
    text = " ".join([name, *(f"{field}={value}" for field, value in fields.items())])
    extra = {f"outbox_{field}": value for field, value in fields.items()}
    # stacklevel: the record names the caller's line.
    logger.log(
        level, "%s", text, exc_info=exc_info, extra={"outbox_event": name, **extra}, stacklevel=2
    )
