"""Transactions of the outbox's own, for calls that come with none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sqlalchemy import Connection

from celery_outbox.context import running_job
from celery_outbox.store.database import Database
from celery_outbox.store.patience import patiently

#: A part of what is written in one transaction; may be run again, and only the last run counts.
Step = Callable[[Connection], None]


def is_callback() -> bool:
    """Whether the call made here is a callback of a job that has ended: its own transaction is
    over, so it waits for a database that is away as long as a claim does."""
    running = running_job.get()
    return running is not None and running.settled


class Alone:
    """Writes calls that come with no transaction.

    Arguments:
        database: the outbox tables.
        timeout: seconds for which a callback waits for the database.
    """

    def __init__(self, database: Database, timeout: float) -> None:
        self._database = database
        self._timeout = timeout

    def write(self, *steps: Step) -> None:
        """Run all steps in one transaction; again when the database rolled it back.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.DBAPIError: the database is away or refuses.
        """
        work = partial(self._database.write_all, steps)
        if is_callback():
            patiently(work, timeout=self._timeout, what="callback")
        else:
            work()
