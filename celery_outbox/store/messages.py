"""Outbox rows: what is to be published, by whom it is being published, and what was."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    Select,
    bindparam,
    case,
    delete,
    func,
    null,
    select,
    update,
)

from celery_outbox.core.states import State
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.dialects import is_mysql, returns_many
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.notification import can_notify
from celery_outbox.store.postgresql.publishing import claim_in_one
from celery_outbox.store.schema import Tables

#: A worker is to run the job.
TASK = "task"
#: A copy of a failed job's message for the quarantine queue.
QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Message:
    """An outbox row that a dispatcher has claimed, with what it needs of the job."""

    id: int
    kind: str
    job_id: str
    task: str
    queue: str | None
    state: State
    envelope_json: str = field(repr=False)
    #: The stored body, for a task of another service; a task of ours travels without it.
    body: bytes | None = field(repr=False)
    relay: bool
    attempt: int
    leased_until: datetime | None
    expires_at: datetime | None
    reason: str | None
    error_code: str | None
    now: datetime

    @classmethod
    def from_row(cls, row: RowMapping) -> Message:
        """Build it from a row that has a column for each attribute."""
        return cls(**{**row, "state": State(row["state"]), "relay": bool(row["relay"])})

    @property
    def envelope(self) -> Envelope:
        """The stored message. Read on demand: a row that is broken must not stop its batch."""
        return Envelope.from_json(self.envelope_json)


def add(
    connection: Connection,
    tables: Tables,
    job_id: str,
    *,
    kind: str = TASK,
    due_at: Any = None,
    wake: bool = False,
) -> None:
    """Add an outbox row.

    Arguments:
        due_at: a datetime or SQL expression; ``None`` for now.
        wake: tell listening dispatchers when the transaction commits (PostgreSQL).
    """
    values = {
        "job_id": job_id,
        "kind": kind,
        "due_at": db_now() if due_at is None else due_at,
    }
    statement: Any = tables.message.insert().values(**values)
    if wake and can_notify(connection):
        # In the same statement: a call costs no round trip for waking anybody.
        statement = statement.returning(func.pg_notify(tables.channel, ""))
    connection.execute(statement)


def add_all(connection: Connection, tables: Tables, job_ids: Collection[str]) -> None:
    """Add a row for each of these jobs, due with it, in one statement and in this order."""
    job, message = tables.job, tables.message
    due_at = select(job.c.available_at)
    rows = [{"job_id": job_id, "kind": TASK} for job_id in job_ids]
    if not returns_many(connection):
        values = [
            {**row, "due_at": due_at.where(job.c.id == row["job_id"]).scalar_subquery()}
            for row in rows
        ]
        connection.execute(message.insert().values(values))
        return
    due_at = due_at.where(job.c.id == bindparam("of", type_=job.c.id.type))
    # What is returned is not used, but makes SQLAlchemy write one statement for all rows.
    statement = message.insert().values(due_at=due_at.scalar_subquery()).returning(message.c.id)
    connection.execute(statement, [{**row, "of": row["job_id"]} for row in rows])


def has_pending(connection: Connection, tables: Tables, job_id: str, kind: str = TASK) -> bool:
    """Whether the job has a row that is still to be published, and that nobody is sending."""
    message = tables.message
    statement = select(message.c.id).where(
        message.c.job_id == job_id,
        message.c.kind == kind,
        message.c.published_at.is_(None),
        message.c.claimed_by.is_(None),
    )
    return connection.execute(statement.limit(1)).first() is not None


def has_copy(connection: Connection, tables: Tables, job_id: str, since: datetime) -> bool:
    """Whether a copy for the quarantine queue was recorded at or after a time."""
    message = tables.message
    statement = select(message.c.id).where(
        message.c.job_id == job_id, message.c.kind == QUARANTINE, message.c.created_at >= since
    )
    return connection.execute(statement.limit(1)).first() is not None


def drop_pending(connection: Connection, tables: Tables, job_id: str) -> None:
    """Take back what was to make the job run; copies for the quarantine queue stay.

    What a dispatcher is sending at this moment stays too, for it to be marked as published.
    """
    message = tables.message
    connection.execute(
        delete(message).where(
            message.c.job_id == job_id,
            message.c.kind == TASK,
            message.c.published_at.is_(None),
            message.c.claimed_by.is_(None),
        )
    )


def claim(
    connection: Connection, tables: Tables, *, claim: str, lease: float, limit: int
) -> list[Message]:
    """Claim rows that are due, oldest first; rows that another dispatcher holds are left out.

    Arguments:
        claim: the name of this claim, which no other claim has.
        lease: seconds after which the rows are free again.
        limit: at most so many.
    """
    if connection.dialect.name == "postgresql":
        rows = claim_in_one(connection, tables, claim=claim, lease=lease, limit=limit)
        return [Message.from_row(row) for row in rows]
    job, message = tables.job, tables.message
    statement = select(
        message.c.id,
        message.c.kind,
        message.c.job_id,
        job.c.task,
        job.c.queue,
        job.c.state,
        job.c.envelope.label("envelope_json"),
        case((job.c.relay == 1, job.c.body), else_=null()).label("body"),
        job.c.relay,
        job.c.attempt,
        job.c.leased_until,
        job.c.expires_at,
        job.c.reason,
        job.c.error_code,
        db_now().label("now"),
    ).join(job, job.c.id == message.c.job_id)
    statement = _due(connection, tables, statement, limit).order_by(message.c.due_at, message.c.id)
    claimed = [Message.from_row(row) for row in connection.execute(statement).mappings()]
    if claimed:
        connection.execute(
            update(message)
            .where(message.c.id.in_([row.id for row in claimed]))
            .values(claimed_by=claim, due_at=db_after(lease))
        )
    return claimed


def _due(connection: Connection, tables: Tables, statement: Select[Any], limit: int) -> Select[Any]:
    message = tables.message
    due = (message.c.published_at.is_(None), message.c.due_at <= db_now())
    if not is_mysql(connection.dialect):
        return statement.where(*due).limit(limit).with_for_update(of=message, skip_locked=True)
    # MariaDB cannot lock the rows of one table out of two: whoever ends a job, and whoever waits
    # for that, would be in each other's way.
    # Nor may they lock more than the batch, as they do where they find a scan of the table cheaper.
    index = f"FORCE INDEX (`ix_{tables.prefix}message_due`)"
    locked = (
        select(message.c.id)
        .with_hint(message, index, "mysql")
        .with_hint(message, index, "mariadb")
        .where(*due)
        .order_by(message.c.due_at, message.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return statement.where(message.c.id.in_(list(connection.execute(locked).scalars())))


def mark_published(
    connection: Connection, tables: Tables, ids: Collection[int], claim: str
) -> set[int]:
    """Mark rows of this claim as published; returns the ids that were still ours."""
    message = tables.message
    if not ids:
        return set()
    ours = (
        select(message.c.id)
        .where(
            message.c.id.in_(ids), message.c.claimed_by == claim, message.c.published_at.is_(None)
        )
        .with_for_update()
    )
    marked = set(connection.execute(ours).scalars())
    if marked:
        connection.execute(
            update(message).where(message.c.id.in_(marked)).values(published_at=db_now())
        )
    return marked


def release(
    connection: Connection,
    tables: Tables,
    ids: Collection[int],
    claim: str,
    *,
    due_at: Any = None,
) -> None:
    """Give rows of this claim back, to be published at ``due_at`` (``None``: now)."""
    message = tables.message
    if ids:
        connection.execute(
            update(message)
            .where(message.c.id.in_(ids), message.c.claimed_by == claim)
            .values(claimed_by=None, due_at=db_now() if due_at is None else due_at)
        )


def drop(connection: Connection, tables: Tables, ids: Collection[int], claim: str) -> None:
    """Delete rows of this claim whose job needs no message any more."""
    message = tables.message
    if ids:
        connection.execute(
            delete(message).where(message.c.id.in_(ids), message.c.claimed_by == claim)
        )


def published_at(tables: Tables) -> Any:
    """When the broker last confirmed a message that makes the job of a query run."""
    message = tables.message
    return (
        select(func.max(message.c.published_at))
        # A copy for the quarantine queue reaches no worker.
        .where(message.c.job_id == tables.job.c.id, message.c.kind == TASK)
        .scalar_subquery()
    )


def seconds_until_due(connection: Connection, tables: Tables) -> float | None:
    """Seconds until the next row is due (0 or less: one is due now), or ``None``: no row."""
    message = tables.message
    statement = (
        select(message.c.due_at, db_now().label("now"))
        .where(message.c.published_at.is_(None))
        .order_by(message.c.due_at)
        .limit(1)
    )
    row = connection.execute(statement).first()
    return None if row is None else float((row.due_at - row.now).total_seconds())
