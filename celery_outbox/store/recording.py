"""Writes a requested operation: the job, its message and the first journal line."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, select

from celery_outbox.core.reasons import Reason, Source
from celery_outbox.core.states import State, Transition
from celery_outbox.exceptions import TooLargeForDatabase
from celery_outbox.store import journal, messages
from celery_outbox.store.clock import db_moment, db_now
from celery_outbox.store.dialects import insert_if_absent
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.schema import Tables

#: The task of a message that names none.
NO_TASK = "(none)"


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


def record(connection: Connection, tables: Tables, new: NewJob, *, actor: str | None) -> bool:
    """Record an operation and the message that makes it run.

    Returns:
        Whether it was recorded; ``False``: there is a job with this id already, and nothing
        was written.
    """
    if not _insert_job(connection, tables, new, State.QUEUED):
        return False
    due_at: Any = new.available_at
    if isinstance(due_at, timedelta):
        # The clock goes on between two statements, and the message is due with its job.
        job = tables.job.c
        due_at = select(job.available_at).where(job.id == new.id).scalar_subquery()
    messages.add(connection, tables, new.id, due_at=due_at, wake=due_at is None)
    line = journal.line(new.id, Transition.RECORD, state=State.QUEUED, attempt=0, actor=actor)
    journal.write(connection, tables, [line])
    return True


def adopt(connection: Connection, tables: Tables, new: NewJob, *, actor: str) -> bool:
    """Record the job of a message that reached a worker without one.

    Returns:
        Whether it was recorded; ``False``: a job with this id exists.
    """
    if not _insert_job(connection, tables, new, State.QUEUED):
        return False
    line = journal.line(new.id, Transition.ADOPT, state=State.QUEUED, attempt=0, actor=actor)
    journal.write(connection, tables, [line])
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
        recorded = _insert_job(connection, tables, new, State.QUARANTINED, **values)
    except TooLargeForDatabase:
        # Better without its arguments than not at all.
        new = replace(new, body=None)
        recorded = _insert_job(connection, tables, new, State.QUARANTINED, **values)
    if not recorded:
        return False
    if copy:
        messages.add(connection, tables, new.id, kind=messages.QUARANTINE, wake=True)
    line = journal.line(
        new.id,
        Transition.QUARANTINE,
        state=State.QUARANTINED,
        attempt=0,
        actor=actor,
        reason=str(reason),
        error_code=error_code,
    )
    journal.write(connection, tables, [line])
    return True


def _insert_job(
    connection: Connection, tables: Tables, new: NewJob, state: State, **more: Any
) -> bool:
    values: dict[str, Any] = {
        "id": new.id,
        "task": new.task,
        "queue": new.queue,
        "state": str(state),
        "envelope": new.envelope.to_json(),
        "body": new.body,
        "relay": int(new.relay),
        "attempt": new.attempt,
        "max_attempts": new.max_attempts,
        "available_at": db_moment(new.available_at),
        "expires_at": new.expires_at,
        "result_key": new.result_key,
        "chord_id": new.chord_id,
        "chord_position": new.chord_position,
        **more,
    }
    return insert_if_absent(connection, tables.job, values)
