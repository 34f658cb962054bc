"""The journal: an append-only list of what happened to each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from celery_outbox.core.states import State
from celery_outbox.store.dialects import returns_many
from celery_outbox.store.schema import Tables


@dataclass(frozen=True)
class Event:
    """One line of the journal.

    Attributes:
        event: what happened: the name of a transition, or ``published``, ``deferred``,
            ``duplicate``, ``stale``, ``copied`` (to the quarantine queue),
            ``republished``, ``mismatch``.
        state: the job's state afterwards.
        actor: the worker, dispatcher or person that did it.
    """

    job_id: str
    at: datetime
    event: str
    state: str | None
    attempt: int | None
    actor: str | None
    reason: str | None
    error_code: str | None


def line(
    job_id: str,
    event: str,
    *,
    state: State | str | None = None,
    attempt: int | None = None,
    actor: str | None = None,
    reason: str | None = None,
    error_code: str | None = None,
) -> dict[str, Any]:
    """The values of one journal line; its time is the database's."""
    return {
        "job_id": job_id,
        "event": str(event),
        "state": None if state is None else str(state),
        "attempt": attempt,
        "actor": actor,
        "reason": None if reason is None else str(reason),
        "error_code": error_code,
    }


def write(connection: Connection, tables: Tables, lines: Sequence[dict[str, Any]]) -> None:
    """Append lines to the journal."""
    if lines:
        connection.execute(tables.event.insert(), lines)


def write_all(connection: Connection, tables: Tables, lines: Sequence[dict[str, Any]]) -> None:
    """Append lines to the journal in one statement, which some drivers make of each otherwise."""
    event = tables.event
    if returns_many(connection):
        # What is returned is not used, but makes SQLAlchemy write one statement for all rows.
        connection.execute(event.insert().returning(event.c.id), list(lines))
    elif lines:
        connection.execute(event.insert().values(list(lines)))


def read(connection: Connection, tables: Tables, job_id: str) -> list[Event]:
    """Every line about a job, oldest first."""
    event = tables.event
    columns = [event.c[name] for name in Event.__dataclass_fields__]
    statement = select(*columns).where(event.c.job_id == job_id).order_by(event.c.id)
    return [Event(**row) for row in connection.execute(statement).mappings()]
