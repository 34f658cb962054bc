"""Waits, within a bound, for a database that is away."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from celery_outbox.log import log_event
from celery_outbox.store.rerun import is_transient

Result = TypeVar("Result")

logger = logging.getLogger("celery_outbox.store")

#: Seconds before the second try, and the ceiling to which the pause doubles.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


def patiently(work: Callable[[], Result], *, timeout: float, what: str) -> Result:
    """Run ``work``, again while the database is away or rolls it back.

    Arguments:
        work: one complete transaction.
        timeout: seconds after which the last error is raised.
        what: the event name for the log.

    Raises:
        sqlalchemy.exc.DBAPIError: the database did not come back in time, or the error is
            not one that passes.
    """
    deadline = time.monotonic() + timeout
    seconds = FIRST_PAUSE
    while True:
        try:
            return work()
        except (DBAPIError, PoolTimeout) as error:
            passes = isinstance(error, PoolTimeout) or is_transient(error)
            if not passes or time.monotonic() + seconds > deadline:
                raise
            log_event(
                logger,
                logging.WARNING,
                "outbox.database_unavailable",
                during=what,
                error=type(error).__name__,
            )
        pause(seconds)
        seconds = min(seconds * 2, LONGEST_PAUSE)


def pause(seconds: float) -> None:
    """Wait; other green threads go on where the pool has them."""
    # An event that nobody sets: gevent and eventlet make it yield.
    threading.Event().wait(seconds)
