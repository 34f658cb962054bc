"""Transactions of the outbox's own, for calls that come with none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from celery_outbox.context import is_callback
from celery_outbox.exceptions import NoTransaction
from celery_outbox.store.patience import patiently

Result = TypeVar("Result")


def check_allowed(task: str, *, require_transaction: bool) -> None:
    """Check that a call may have a transaction of its own; a callback always may.

    Raises:
        NoTransaction: it has to come with one.
    """
    if require_transaction and not is_callback():
        raise NoTransaction(task=task)


def in_own_transaction(work: Callable[[], Result], *, timeout: float) -> Result:
    """Run ``work``; what is recorded for a callback waits for a database that is away, as long as
    a claim does: the job has ended, and nobody would make the call again.

    Arguments:
        work: one complete transaction.
        timeout: seconds for which a callback waits.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away or refuses.
    """
    if is_callback():
        return patiently(work, timeout=timeout, what="callback")
    return work()
