"""Builds what tests start from: apps, databases with tables, jobs in a given state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import celery
from celery import Celery, Task
from sqlalchemy import Connection, Engine, func, select, text, update

from celery_outbox import Outbox
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.record.capture import RecordingProducer
from celery_outbox.store import (
    continuing,
    install,
    journal,
    messages,
    quarantining,
    recording,
    relaying,
    transitions,
)
from celery_outbox.store import job as jobs
from celery_outbox.store.clock import db_after
from celery_outbox.store.engine import open_engine
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.job import Job
from celery_outbox.store.recording import NewJob
from celery_outbox.store.rerun import retry_transaction
from celery_outbox.store.schema import Tables, build_tables

#: Nothing listens on port 1.
UNREACHABLE_BROKER = "amqp://guest:guest@127.0.0.1:1//"

_NEVER_CLAIMED = frozenset({State.QUEUED, State.CANCELLED, State.EXPIRED, State.RELAYED})

_numbers = itertools.count(1)


def make_app(**conf: Any) -> Celery:
    """Return an app that uses the outbox; its broker cannot be reached."""
    app = Celery(
        "shop",
        broker=UNREACHABLE_BROKER,
        task_cls="celery_outbox:OutboxTask",
        set_as_current=False,
    )
    app.conf.update(conf)
    return app


def make_stock_app(**conf: Any) -> Celery:
    """Return an app as it is without the outbox."""
    app = Celery("shop", broker=UNREACHABLE_BROKER, set_as_current=False)
    app.conf.update(conf)
    return app


def return_nothing(*args: Any, **kwargs: Any) -> None:
    """Do what a task's body does where the test is not about it."""


def add_task(app: Celery, body: Callable[..., Any] = return_nothing, **options: Any) -> Task:
    """Register a task, with this app alone."""
    options.setdefault("name", "shop.export")
    return app.task(body, shared=False, lazy=False, **options)


@contextmanager
def open_outbox(database_url: str, *, init: bool = True, **conf: Any) -> Iterator[Outbox]:
    """Yield the outbox of a new app, with its tables made."""
    outbox = Outbox(make_app(outbox_database_url=database_url, **conf))
    if init:
        outbox.init()
    try:
        yield outbox
    finally:
        outbox.engine.dispose()


def capture(app: Celery, *args: Any, task: Task | None = None, **options: Any) -> Any:
    """Return what the recording producer catches of a call: the envelope and the body."""
    task = task or add_task(app)
    producer = RecordingProducer()
    options.setdefault("ignore_result", True)
    celery.Task.apply_async(task, list(args), producer=producer, **options)
    return producer.captured(app.amqp.queues)


def new_envelope(**values: Any) -> Envelope:
    """Return the envelope of an ordinary call."""
    job_id = values.pop("job_id", "job-1")
    defaults: dict[str, Any] = {
        "exchange": "",
        "routing_key": "celery",
        "queue": "celery",
        "headers": {"id": job_id, "task": "shop.export", "eta": None, "expires": None},
        "properties": {"correlation_id": job_id},
        "content_type": "application/json",
        "content_encoding": "utf-8",
    }
    return Envelope(**{**defaults, **values})


def new_job(job_id: str | None = None, **values: Any) -> NewJob:
    """Return a job that nobody has recorded."""
    job_id = job_id or f"job-{next(_numbers)}"
    defaults: dict[str, Any] = {
        "task": "shop.export",
        "queue": "celery",
        "envelope": new_envelope(job_id=job_id),
        "body": b"[[], {}, {}]",
        "max_attempts": 3,
    }
    return NewJob(id=job_id, **{**defaults, **values})


def new_message(**values: Any) -> messages.Message:
    """Return an outbox row as a dispatcher claims it."""
    defaults: dict[str, Any] = {
        "id": 1,
        "kind": messages.TASK,
        "job_id": "job-1",
        "task": "shop.export",
        "queue": "celery",
        "state": State.QUEUED,
        "envelope_json": new_envelope().to_json(),
        "body": None,
        "relay": False,
        "attempt": 0,
        "leased_until": None,
        "expires_at": None,
        "reason": None,
        "error_code": None,
        "now": datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc),
    }
    return messages.Message(**{**defaults, **values})


@dataclass(frozen=True)
class Database:
    """A database with outbox tables, and the questions that tests ask it."""

    engine: Engine
    tables: Tables

    def do(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of the store in a transaction of its own, and commit it."""
        return retry_transaction(
            self.engine, lambda connection: step(connection, self.tables, *args, **options)
        )

    def job(self, job_id: str) -> Job:
        """Return the job's row, which must be there."""
        job: Job | None = self.do(jobs.get, job_id)
        assert job is not None, f"there is no job {job_id!r}"
        return job

    def events(self, job_id: str) -> list[str]:
        """Return the names of the job's journal lines, oldest first."""
        return [event.event for event in self.do(journal.read, job_id)]

    def messages(self, job_id: str | None = None, *, pending: bool = True) -> list[Any]:
        """Return outbox rows, oldest first: those still to be published, or all."""
        message = self.tables.message
        statement = select(message).order_by(message.c.id)
        if job_id is not None:
            statement = statement.where(message.c.job_id == job_id)
        if pending:
            statement = statement.where(message.c.published_at.is_(None))
        with self.engine.connect() as connection:
            return list(connection.execute(statement))

    def counts(self) -> tuple[int, int, int]:
        """Return how many jobs, messages and journal lines there are."""
        with self.engine.connect() as connection:
            return tuple(  # type: ignore[return-value]
                connection.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (self.tables.job, self.tables.message, self.tables.event)
            )

    def execute(self, statement: Any) -> None:
        """Run a statement (text or SQLAlchemy) in a transaction of its own."""

        def run(connection: Connection, tables: Tables) -> None:
            connection.execute(text(statement) if isinstance(statement, str) else statement)

        self.do(run)

    def empty(self) -> None:
        """Delete every row but the version of the tables."""

        def run(connection: Connection, tables: Tables) -> None:
            for table in reversed(tables.metadata.sorted_tables):
                if table is not tables.version:
                    connection.execute(table.delete())

        self.do(run)

    def wait_for_locks(self, connection: Connection, seconds: int) -> None:
        """Let this transaction fail that waits longer for a lock."""
        is_postgresql = connection.dialect.name == "postgresql"
        setting = "LOCAL lock_timeout" if is_postgresql else "SESSION innodb_lock_wait_timeout"
        connection.exec_driver_sql(f"SET {setting} = {seconds * (1000 if is_postgresql else 1)}")

    def make_due(self, job_id: str) -> None:
        """Let a job that waits for its next attempt be due since a second."""
        job = self.tables.job
        self.execute(update(job).where(job.c.id == job_id).values(available_at=db_after(-1)))

    def end_lease(self, job_id: str) -> None:
        """Make a running job's lease end a second ago."""
        job = self.tables.job
        self.execute(update(job).where(job.c.id == job_id).values(leased_until=db_after(-1)))

    def put(self, state: State, *, job_id: str | None = None, **values: Any) -> Job:
        """Record a job and take it, by transitions alone, to ``state``."""
        if state is State.RELAYED:
            values["relay"] = True
        new = new_job(job_id, **values)
        self.do(recording.record, new, actor="caller")
        if state not in _NEVER_CLAIMED:
            self.do(transitions.claim, self.job(new.id), actor="worker", lease=60)
        end: dict[str, Any] = {"attempt": 1, "actor": "worker"}
        if state is State.RETRYING:
            self.do(transitions.retry, new.id, 1, error_code="OSError", **end)
        elif state is State.REPLACED:
            self.do(continuing.replace, new.id, 1, **end)
        elif state is State.SUCCEEDED:
            self.do(transitions.succeed, new.id, 1, result=b"1", result_type="json", **end)
        elif state is State.QUARANTINED:
            why: dict[str, Any] = {"reason": Reason.PERMANENT, "error_code": "ValueError"}
            self.do(quarantining.quarantine, new.id, 1, copy=False, **why, **end)
        elif state is State.CANCELLED:
            self.do(transitions.cancel, self.job(new.id), actor="person")
        elif state is State.EXPIRED:
            self.do(transitions.expire, new.id, attempt=0, actor="maintenance")
        elif state is State.RELAYED:
            self.do(relaying.relay, new.id, attempt=0, actor="dispatcher")
        job = self.job(new.id)
        assert job.state is state
        return job


@contextmanager
def open_database(
    url: str, *, init: bool = True, prefix: str = "outbox_", schema: str | None = None
) -> Iterator[Database]:
    """Yield a database, with its tables made unless they are there."""
    engine = open_engine(url)
    database = Database(engine, build_tables(prefix, schema))
    try:
        if init:
            database.do(install.install)
        yield database
    finally:
        engine.dispose()
