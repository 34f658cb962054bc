"""The tables, in a MetaData of their own or in one that is given."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    text,
)

from celery_outbox.core.states import State
from celery_outbox.store.chord_tables import chord_table, part_table
from celery_outbox.store.clock import UTCDateTime, db_now
from celery_outbox.store.dialects import TABLE_OPTIONS, LongBinary, LongText, Name, Serial
from celery_outbox.store.partial import partial_index

#: Version of the tables that this code reads and writes.
SCHEMA_VERSION = 1

#: Longest job id, in characters: Celery's own result tables hold as many.
MAX_JOB_ID = 255

#: Longest name of a task or queue, in characters.
MAX_NAME = 255


@dataclass(frozen=True)
class Tables:
    """The outbox tables under one schema and prefix."""

    metadata: MetaData
    job: Table
    message: Table
    event: Table
    checkpoint: Table
    lock: Table
    worker: Table
    chord: Table
    chord_part: Table
    version: Table
    prefix: str
    schema: str | None

    @property
    def channel(self) -> str:
        """The NOTIFY channel that wakes dispatchers of these tables."""
        name = f"{self.schema or ''}.{self.prefix}"
        # PostgreSQL cuts nothing here: a channel of more than 63 bytes is an error.
        return name if len(name.encode()) <= 63 else hashlib.sha256(name.encode()).hexdigest()[:63]


def build_tables(
    prefix: str = "outbox_", schema: str | None = None, metadata: MetaData | None = None
) -> Tables:
    """Define the tables.

    Arguments:
        prefix: start of every table name.
        schema: database schema, or ``None`` for the connection's default.
        metadata: where to define them; a new one by default.
    """
    meta = metadata if metadata is not None else MetaData()
    name = f"{schema}.{prefix}job" if schema else f"{prefix}job"
    return Tables(
        metadata=meta,
        job=_job(meta, prefix, schema),
        message=_message(meta, prefix, schema, name),
        event=_event(meta, prefix, schema),
        checkpoint=_checkpoint(meta, prefix, schema, name),
        lock=_lock(meta, prefix, schema),
        worker=_worker(meta, prefix, schema),
        chord=chord_table(meta, prefix, schema),
        chord_part=part_table(meta, prefix, schema),
        version=_version(meta, prefix, schema),
        prefix=prefix,
        schema=schema,
    )


def _job(meta: MetaData, prefix: str, schema: str | None) -> Table:
    states = ", ".join(f"'{state}'" for state in State)
    table = Table(
        f"{prefix}job",
        meta,
        Column("id", Name(MAX_JOB_ID), primary_key=True),
        Column("task", Name(MAX_NAME), nullable=False),
        Column("queue", Name(255)),
        Column("state", Name(16), nullable=False),
        # The complete Celery message: routing, properties and headers as JSON, the body as the
        # bytes that Celery's serializer made. A body of NULL: nobody knows the arguments.
        Column("envelope", LongText, nullable=False),
        Column("body", LongBinary),
        # The task is not ours: its message goes out in full and needs no guard.
        Column("relay", Integer, nullable=False, server_default=text("0")),
        Column("attempt", Integer, nullable=False, server_default=text("0")),
        Column("max_attempts", Integer, nullable=False),
        # Continuations that the job itself asked for: what it calls since then is new.
        Column("part", Integer, nullable=False, server_default=text("0")),
        # Attempts that it had when its present call began (self.replace).
        Column("attempts_before", Integer, nullable=False, server_default=text("0")),
        Column("deliveries", Integer, nullable=False, server_default=text("0")),
        Column("lease_token", BigInteger, nullable=False, server_default=text("0")),
        # A number that its claim came with: one whose answer was lost is known by it.
        Column("lease_nonce", BigInteger),
        Column("leased_by", Name(255)),
        Column("leased_until", UTCDateTime),
        Column("recorded_at", UTCDateTime, nullable=False, default=db_now()),
        Column("available_at", UTCDateTime, nullable=False),
        Column("expires_at", UTCDateTime),
        Column("started_at", UTCDateTime),
        Column("finished_at", UTCDateTime),
        Column("result_key", Name(1024)),
        Column("result", LongBinary),
        Column("result_type", Name(255)),
        Column("reason", Name(32)),
        Column("source", Name(16)),
        Column("error_code", Name(255)),
        Column("error_detail", LongText),
        # The chord that waits for this job, or for the end of the chain that it begins; NULL again
        # when it was counted.
        Column("chord_id", Name(255)),
        # Where in the chord's header it stands; NULL: it only begins a chain that does.
        Column("chord_position", Integer),
        # When Celery's side is to be told of an end that no worker may ever meet; NULL: it was, or
        # somebody else tells it.
        Column("report_at", UTCDateTime),
        CheckConstraint(f"state IN ({states})", name=f"{prefix}job_state"),
        CheckConstraint("id <> ''", name=f"{prefix}job_id"),
        CheckConstraint("max_attempts >= 1 AND attempt >= 0", name=f"{prefix}job_attempts"),
        CheckConstraint(
            "(state = 'running') = (leased_by IS NOT NULL)"
            " AND (leased_by IS NULL) = (leased_until IS NULL)",
            name=f"{prefix}job_lease",
        ),
        CheckConstraint(
            "(state IN ('queued', 'running', 'retrying', 'replaced')) = (finished_at IS NULL)",
            name=f"{prefix}job_finished",
        ),
        CheckConstraint(
            "(state = 'quarantined') = (reason IS NOT NULL)", name=f"{prefix}job_reason"
        ),
        schema=schema,
        **TABLE_OPTIONS,
    )
    column = table.c
    # MariaDB and MySQL have no partial indexes: each has the columns there that leave out as much.
    # A lease is NULL unless the job runs, and only what is final has a time at which it ended.
    partial_index(f"ix_{prefix}job_running", "state = 'running'", column.leased_until)
    partial_index(f"ix_{prefix}job_final", "finished_at IS NOT NULL", column.finished_at)
    partial_index(
        f"ix_{prefix}job_expiring",
        "expires_at IS NOT NULL AND finished_at IS NULL",
        column.expires_at,
        instead=(column.finished_at, column.expires_at),
    )
    partial_index(
        f"ix_{prefix}job_waiting",
        "state IN ('queued', 'retrying')",
        column.available_at,
        instead=(column.finished_at, column.available_at),
    )
    partial_index(
        f"ix_{prefix}job_quarantined",
        "state = 'quarantined'",
        column.finished_at,
        instead=(column.state, column.finished_at),
    )
    partial_index(
        f"ix_{prefix}job_uncounted",
        "chord_id IS NOT NULL AND finished_at IS NOT NULL",
        column.finished_at,
        instead=(column.chord_id, column.finished_at),
    )
    partial_index(f"ix_{prefix}job_untold", "report_at IS NOT NULL", column.report_at)
    Index(f"ix_{prefix}job_recorded", table.c.recorded_at)
    return table


def _message(meta: MetaData, prefix: str, schema: str | None, job: str) -> Table:
    table = Table(
        f"{prefix}message",
        meta,
        Column("id", Serial, primary_key=True, autoincrement=True),
        Column("job_id", ForeignKey(f"{job}.id", ondelete="CASCADE"), nullable=False),
        # 'task': a worker is to run the job; 'quarantine': a copy for the quarantine queue.
        Column("kind", Name(16), nullable=False),
        Column("created_at", UTCDateTime, nullable=False, default=db_now()),
        # When a dispatcher may take it; a claim moves it to the end of the dispatcher's lease.
        Column("due_at", UTCDateTime, nullable=False),
        # Names one claim of one dispatcher, so that a claim which was lost marks nothing.
        Column("claimed_by", Name(255)),
        Column("published_at", UTCDateTime),
        CheckConstraint("kind IN ('task', 'quarantine')", name=f"{prefix}message_kind"),
        schema=schema,
        **TABLE_OPTIONS,
        # Otherwise SQLite gives the number of a deleted row to the next one.
        sqlite_autoincrement=True,
    )
    partial_index(
        f"ix_{prefix}message_due",
        "published_at IS NULL",
        table.c.due_at,
        table.c.id,
        instead=(table.c.published_at, table.c.due_at, table.c.id),
    )
    Index(f"ix_{prefix}message_job", table.c.job_id)
    return table


def _event(meta: MetaData, prefix: str, schema: str | None) -> Table:
    table = Table(
        f"{prefix}event",
        meta,
        Column("id", Serial, primary_key=True, autoincrement=True),
        # No foreign key: the journal is kept longer than the job.
        Column("job_id", Name(MAX_JOB_ID), nullable=False),
        Column("at", UTCDateTime, nullable=False, default=db_now()),
        Column("event", Name(32), nullable=False),
        Column("state", Name(16)),
        Column("attempt", Integer),
        Column("actor", Name(255)),
        Column("reason", Name(32)),
        Column("error_code", Name(255)),
        schema=schema,
        **TABLE_OPTIONS,
        sqlite_autoincrement=True,
    )
    Index(f"ix_{prefix}event_job", table.c.job_id, table.c.id)
    return table


def _checkpoint(meta: MetaData, prefix: str, schema: str | None, job: str) -> Table:
    return Table(
        f"{prefix}checkpoint",
        meta,
        Column("job_id", ForeignKey(f"{job}.id", ondelete="CASCADE"), primary_key=True),
        Column("name", Name(255), primary_key=True),
        Column("value", LongText),
        Column("updated_at", UTCDateTime, nullable=False, default=db_now()),
        schema=schema,
        **TABLE_OPTIONS,
    )


def _lock(meta: MetaData, prefix: str, schema: str | None) -> Table:
    return Table(
        f"{prefix}lock",
        meta,
        Column("name", Name(255), primary_key=True),
        Column("token", BigInteger, nullable=False, server_default=text("0")),
        Column("held_by", Name(255)),
        Column("held_until", UTCDateTime),
        CheckConstraint("(held_by IS NULL) = (held_until IS NULL)", name=f"{prefix}lock_held"),
        schema=schema,
        **TABLE_OPTIONS,
    )


def _worker(meta: MetaData, prefix: str, schema: str | None) -> Table:
    return Table(
        f"{prefix}worker",
        meta,
        Column("id", Name(255), primary_key=True),
        Column("hostname", Name(255), nullable=False),
        Column("pid", Integer, nullable=False),
        Column("started_at", UTCDateTime, nullable=False, default=db_now()),
        Column("seen_at", UTCDateTime, nullable=False, default=db_now()),
        schema=schema,
        **TABLE_OPTIONS,
    )


def _version(meta: MetaData, prefix: str, schema: str | None) -> Table:
    return Table(
        f"{prefix}version",
        meta,
        Column("version", Integer, primary_key=True, autoincrement=False),
        Column("installed_at", UTCDateTime, nullable=False, default=db_now()),
        # Tells these tables from those in another database.
        Column("installation", Name(36), nullable=False, default=lambda: str(uuid.uuid4())),
        schema=schema,
        **TABLE_OPTIONS,
    )
