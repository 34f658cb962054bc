"""A job as its row says, and the reads of jobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, select

from celery_outbox.core.decisions import JobFacts
from celery_outbox.core.part import Part
from celery_outbox.core.states import State
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.dialects import is_mysql
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.messages import published_at
from celery_outbox.store.schema import Tables


@dataclass(frozen=True)
class Job:
    """One row of ``outbox_job``; ``now`` is the database's clock when it was read."""

    id: str
    task: str
    queue: str | None
    state: State
    envelope_json: str = field(repr=False)
    body: bytes | None = field(repr=False)
    relay: bool
    attempt: int
    max_attempts: int
    part_number: int
    attempts_before: int
    deliveries: int
    lease_token: int
    lease_nonce: int | None
    leased_by: str | None
    leased_until: datetime | None
    recorded_at: datetime
    available_at: datetime
    expires_at: datetime | None
    published_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    result_key: str | None
    result: bytes | None = field(repr=False)
    result_type: str | None
    reason: str | None
    source: str | None
    error_code: str | None
    error_detail: str | None = field(repr=False)
    chord_id: str | None
    chord_position: int | None
    report_at: datetime | None
    now: datetime

    @classmethod
    def from_row(cls, row: RowMapping) -> Job:
        """Build it from a row that has every column of the table and ``now``."""
        values: dict[str, Any] = dict(row)
        values["state"] = State(values["state"])
        values["envelope_json"] = values.pop("envelope")
        values["part_number"] = values.pop("part")
        values["relay"] = bool(values["relay"])
        return cls(**values)

    @cached_property
    def envelope(self) -> Envelope:
        """The stored message. Read on demand, and once: a row that is broken must not stop a
        listing, and a worker asks for it several times."""
        return Envelope.from_json(self.envelope_json)

    @property
    def part(self) -> Part:
        """The part of the job's life that it is in."""
        return Part(self.part_number, self.attempts_before, self.max_attempts)

    @property
    def facts(self) -> JobFacts:
        """What a decision needs to know of this job."""
        return JobFacts(
            state=self.state,
            attempt=self.attempt,
            max_attempts=self.max_attempts,
            leased_until=self.leased_until,
            available_at=self.available_at,
            expires_at=self.expires_at,
        )


def _select(tables: Tables) -> Select[Any]:
    published = published_at(tables)
    return select(tables.job, published.label("published_at"), db_now().label("now"))


def get(connection: Connection, tables: Tables, job_id: str) -> Job | None:
    """The job with this id, or ``None``."""
    row = connection.execute(_select(tables).where(tables.job.c.id == job_id)).mappings().first()
    return None if row is None else Job.from_row(row)


def lock(connection: Connection, tables: Tables, job_id: str) -> Job | None:
    """The job with this id, locked until the transaction ends, or ``None``."""
    statement = _select(tables).where(tables.job.c.id == job_id).with_for_update(of=tables.job)
    row = connection.execute(statement).mappings().first()
    return None if row is None else Job.from_row(row)


def exists(connection: Connection, tables: Tables, job_id: str) -> bool:
    """Whether there is a job with this id."""
    statement = select(tables.job.c.id).where(tables.job.c.id == job_id)
    return connection.execute(statement).first() is not None


def first(connection: Connection, tables: Tables, job_id: str) -> Job | None:
    """The job that an insert of this id has found, also where the caller's transaction began before
    it was recorded; ``None``: there is no such job."""
    statement = _select(tables).where(tables.job.c.id == job_id)
    if is_mysql(connection.dialect):
        # A locking read sees past the snapshot. An insert that found the row has this lock.
        statement = statement.with_for_update(read=True, of=tables.job)
    row = connection.execute(statement).mappings().first()
    return None if row is None else Job.from_row(row)


def find(
    connection: Connection,
    tables: Tables,
    *,
    states: frozenset[State] = frozenset(),
    task: str | None = None,
    queue: str | None = None,
    error_code: str | None = None,
    older_than: timedelta | None = None,
    limit: int = 100,
) -> list[Job]:
    """The newest jobs that match every given filter, newest first.

    Arguments:
        states: any of these states; empty for all.
        older_than: recorded at least this long ago.
        limit: at most so many.
    """
    job = tables.job
    statement = _select(tables).order_by(job.c.recorded_at.desc(), job.c.id.desc()).limit(limit)
    if states:
        statement = statement.where(job.c.state.in_(sorted(str(state) for state in states)))
    if task is not None:
        statement = statement.where(job.c.task == task)
    if queue is not None:
        statement = statement.where(job.c.queue == queue)
    if error_code is not None:
        statement = statement.where(job.c.error_code == error_code)
    if older_than is not None:
        statement = statement.where(job.c.recorded_at <= db_after(-older_than.total_seconds()))
    return [Job.from_row(row) for row in connection.execute(statement).mappings()]


def lock_expired(connection: Connection, tables: Tables, limit: int) -> list[Job]:
    """Jobs whose lease has ended, locked; those that somebody else has locked are left out."""
    job = tables.job
    statement = (
        _select(tables)
        .where(job.c.state == str(State.RUNNING), job.c.leased_until <= db_now())
        .order_by(job.c.leased_until)
        .limit(limit)
        .with_for_update(of=tables.job, skip_locked=True)
    )
    return [Job.from_row(row) for row in connection.execute(statement).mappings()]


def lock_overdue(connection: Connection, tables: Tables, limit: int) -> list[Job]:
    """Waiting jobs whose ``expires_at`` has passed, locked."""
    job = tables.job
    statement = (
        _select(tables)
        .where(
            job.c.expires_at <= db_now(),
            job.c.finished_at.is_(None),
            job.c.state.in_([str(State.QUEUED), str(State.RETRYING)]),
        )
        .order_by(job.c.expires_at)
        .limit(limit)
        .with_for_update(of=tables.job, skip_locked=True)
    )
    return [Job.from_row(row) for row in connection.execute(statement).mappings()]
