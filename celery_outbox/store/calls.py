"""Calls that are recorded and not written yet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby

from sqlalchemy import Connection

from celery_outbox.store.absorbing import absorb
from celery_outbox.store.recording import NewJob, record_all
from celery_outbox.store.schema import Tables


@dataclass(frozen=True)
class Call:
    """A call that is recorded and not written yet.

    Attributes:
        new: the job that it asks for.
        actor: who made it, for the journal.
        at: when it was made, by this process's monotonic clock.
    """

    new: NewJob
    actor: str
    at: float

    @classmethod
    def of(cls, new: NewJob, actor: str) -> Call:
        """A call that is made now."""
        return cls(new, actor, time.monotonic())

    @property
    def size(self) -> int:
        """Bytes of its arguments and characters of its envelope."""
        return len(self.new.body or b"") + len(self.new.envelope_json)

    @property
    def due(self) -> NewJob:
        """The job as it is to be written now: its delay counts from the call."""
        wait = self.new.available_at
        if not isinstance(wait, timedelta):
            return self.new
        wait -= timedelta(seconds=time.monotonic() - self.at)
        return replace(self.new, available_at=max(wait, timedelta()))


def write_calls(connection: Connection, tables: Tables, calls: Sequence[Call]) -> None:
    """Write calls in their order, in the transaction of a connection.

    Arguments:
        calls: at most :data:`~celery_outbox.store.recording.MOST_ROWS`.

    Raises:
        JobIdTaken: an id is a job of another task.
        sqlalchemy.exc.DBAPIError: the database is away or refuses.
    """
    for actor, group in groupby(calls, key=lambda call: call.actor):
        due = [call.due for call in group]
        for new in record_all(connection, tables, due, actor=actor):
            absorb(connection, tables, new, actor=actor)
