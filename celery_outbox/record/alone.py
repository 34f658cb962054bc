"""Transactions of the outbox's own, for calls that come with none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from celery_outbox.context import is_callback
from celery_outbox.exceptions import NoTransaction
from celery_outbox.store.database import Database
from celery_outbox.store.patience import patiently

Result = TypeVar("Result")

#: A part of what is written in one transaction; may be run again, and only the last run counts.
Step = Callable[[Connection], None]


class Alone:
    """Writes calls that come with no transaction.

    Arguments:
        database: the outbox tables.
        require_transaction: refuse them, unless they are callbacks.
        timeout: seconds for which a callback waits for the database.
    """

    def __init__(self, database: Database, *, require_transaction: bool, timeout: float) -> None:
        self._database = database
        self._require_transaction = require_transaction
        self._timeout = timeout

    def check_allowed(self, task: str) -> None:
        """Check that a call may have a transaction of its own; a callback always may.

        Raises:
            NoTransaction: it has to come with one.
        """
        if self._require_transaction and not is_callback():
            raise NoTransaction(task=task)

    def write(self, *steps: Step) -> None:
        """Run all steps in one transaction; again when the database rolled it back.

        What is recorded for a callback waits for a database that is away, as long as a claim does:
        the job has ended, and nobody would make the call again.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.DBAPIError: the database is away or refuses.
        """
        self._patiently(partial(self._database.write_all, steps))

    def write_in_one(self, work: Callable[[Connection], Result]) -> Result:
        """As :meth:`write`, for a ``work`` that is one statement where the database does that."""
        return self._patiently(partial(self._database.write_in_one, work))

    def _patiently(self, work: Callable[[], Result]) -> Result:
        if is_callback():
            return patiently(work, timeout=self._timeout, what="callback")
        return work()
