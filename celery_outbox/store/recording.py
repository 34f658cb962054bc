"""Writes a requested operation: the job, its message and the first journal line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Float, bindparam, func, select
from sqlalchemy.dialects import sqlite

from celery_outbox.core.reasons import Reason, Source
from celery_outbox.core.states import Transition, target
from celery_outbox.exceptions import TooLargeForDatabase
from celery_outbox.store import journal, messages
from celery_outbox.store.applying import note
from celery_outbox.store.clock import UTCDateTime, after_now, db_moment, db_now
from celery_outbox.store.dialects import insert_absent, insert_if_absent, returns_many
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.postgresql.recording import record_in_one
from celery_outbox.store.schema import Tables

#: The task of a message that names none.
NO_TASK = "(none)"

#: Rows that one statement takes: with 15 parameters each, drivers count up to 32,767 of them.
MOST_ROWS = 500


@dataclass(frozen=True)
class NewJob:
    """An operation that somebody asked for.

    Attributes:
        available_at: not before this time; a ``timedelta`` counts from now by the database's clock,
            ``None`` is now.
        expires_at: not after this time; ``None``: whenever.
        relay: the task belongs to another service.
        chord_id: the chord that waits for it, or for the end of the chain that it begins.
        chord_position: where in the chord's header it stands; ``None``: it only begins a chain.
        attempt: attempts that were made before the job was recorded.
        envelope_json: the text of the envelope, made when the job is: its headers are the
            caller's objects, who may change them before it is written.
    """

    id: str
    task: str
    queue: str | None
    envelope: Envelope
    body: bytes | None = field(repr=False)
    max_attempts: int
    attempt: int = 0
    relay: bool = False
    chord_id: str | None = None
    chord_position: int | None = None
    available_at: datetime | timedelta | None = None
    expires_at: datetime | None = None
    result_key: str | None = None
    envelope_json: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.envelope_json:
            object.__setattr__(self, "envelope_json", self.envelope.to_json())


def record(connection: Connection, tables: Tables, new: NewJob, *, actor: str | None) -> bool:
    """Record an operation and the message that makes it run.

    Returns:
        Whether it was recorded; ``False``: there is a job with this id already, and nothing
        was written.
    """
    if connection.dialect.name == "postgresql":
        return bool(record_in_one(connection, tables, [new], actor=actor))
    if not _insert_job(connection, tables, new, Transition.RECORD):
        return False
    due_at: Any = new.available_at
    if isinstance(due_at, timedelta):
        # The clock goes on between two statements, and the message is due with its job.
        job = tables.job.c
        due_at = select(job.available_at).where(job.id == new.id).scalar_subquery()
    messages.add(connection, tables, new.id, due_at=due_at)
    note(connection, tables, Transition.RECORD, new.id, 0, actor)
    return True


def record_all(
    connection: Connection, tables: Tables, calls: Sequence[NewJob], *, actor: str | None
) -> list[NewJob]:
    """Record many operations as :func:`record` does, in one statement (PostgreSQL) or three; their
    messages are published in the order of the calls.

    Arguments:
        calls: at most so many that one statement takes the rows of all (:data:`MOST_ROWS`).

    Returns:
        Those that were not recorded, because there is a job with their id already.
    """
    if len(calls) == 1:
        return [new for new in calls if not record(connection, tables, new, actor=actor)]
    # The second call with an id finds the first one here, too.
    wanted = {new.id: new for new in reversed(calls)}
    firsts = [new for new in calls if wanted[new.id] is new]
    if connection.dialect.name == "postgresql":
        inserted = record_in_one(connection, tables, firsts, actor=actor)
    else:
        inserted = _insert_jobs(connection, tables, firsts)
        _add_messages(connection, tables, [new for new in firsts if new.id in inserted], actor)
    return [new for new in calls if new.id not in inserted or wanted[new.id] is not new]


def _add_messages(
    connection: Connection, tables: Tables, recorded: Sequence[NewJob], actor: str | None
) -> None:
    if recorded:
        state = target(Transition.RECORD)
        messages.add_all(connection, tables, [new.id for new in recorded])
        lines = [
            journal.line(new.id, Transition.RECORD, state=state, attempt=0, actor=actor)
            for new in recorded
        ]
        journal.write_all(connection, tables, lines)


def adopt(connection: Connection, tables: Tables, new: NewJob, *, actor: str) -> bool:
    """Record the job of a message that reached a worker without one.

    Returns:
        Whether it was recorded; ``False``: a job with this id exists.
    """
    if not _insert_job(connection, tables, new, Transition.ADOPT):
        return False
    note(connection, tables, Transition.ADOPT, new.id, 0, actor)
    return True


def record_quarantined(
    connection: Connection,
    tables: Tables,
    new: NewJob,
    *,
    reason: Reason,
    actor: str,
    copy: bool,
    error_code: str | None = None,
) -> bool:
    """Record a message that names no known job as a quarantined job of its own.

    Arguments:
        error_code: what exactly is wrong with it.
        copy: also send a copy to the quarantine queue.

    Returns:
        Whether it was recorded; ``False``: a job with this id exists.
    """
    values = {
        "reason": str(reason),
        "source": str(Source.BROKER),
        "error_code": error_code,
        "finished_at": db_now(),
        "deliveries": 1,
    }
    try:
        recorded = _insert_job(connection, tables, new, Transition.QUARANTINE, **values)
    except TooLargeForDatabase:
        # Better without its arguments than not at all.
        new = replace(new, body=None)
        recorded = _insert_job(connection, tables, new, Transition.QUARANTINE, **values)
    if not recorded:
        return False
    if copy:
        messages.add(connection, tables, new.id, kind=messages.QUARANTINE, wake=True)
    note(
        connection,
        tables,
        Transition.QUARANTINE,
        new.id,
        0,
        actor,
        reason=str(reason),
        error_code=error_code,
    )
    return True


def _insert_job(
    connection: Connection, tables: Tables, new: NewJob, transition: Transition, **more: Any
) -> bool:
    values = {**_columns(new, transition), "available_at": db_moment(new.available_at), **more}
    return insert_if_absent(connection, tables.job, values)


def _columns(new: NewJob, transition: Transition) -> dict[str, Any]:
    return {
        "id": new.id,
        "task": new.task,
        "queue": new.queue,
        "state": str(target(transition)),
        "envelope": new.envelope_json,
        "body": new.body,
        "relay": int(new.relay),
        "attempt": new.attempt,
        "max_attempts": new.max_attempts,
        "expires_at": new.expires_at,
        "result_key": new.result_key,
        "chord_id": new.chord_id,
        "chord_position": new.chord_position,
    }


def _insert_jobs(connection: Connection, tables: Tables, calls: Sequence[NewJob]) -> set[str]:
    """Insert the rows of jobs that are not there; returns the ids that were inserted."""
    job = tables.job
    if not returns_many(connection):
        values = [
            {**_columns(new, Transition.RECORD), "available_at": db_moment(new.available_at)}
            for new in calls
        ]
        return insert_absent(connection, job, values)
    # One expression for all rows: SQLAlchemy then makes one statement of them, and only once.
    available_at = func.coalesce(
        bindparam("moment", type_=UTCDateTime()), after_now(bindparam("wait", type_=Float()))
    )
    statement: Any = sqlite.insert(job).values(available_at=available_at)
    statement = statement.on_conflict_do_nothing().returning(job.c.id)
    rows = []
    for new in calls:
        moment: Any = new.available_at
        wait = moment.total_seconds() if isinstance(moment, timedelta) else 0.0
        moment = None if isinstance(moment, timedelta) else moment
        rows.append({**_columns(new, Transition.RECORD), "moment": moment, "wait": wait})
    return set(connection.execute(statement, rows).scalars())
