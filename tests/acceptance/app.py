"""The Celery app that acceptance tests run in real workers and dispatchers.

Configured by the environment alone, so that every process of a test gets the same.
"""

from __future__ import annotations

import json
import os
import resource
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import Retry
from kombu import Queue
from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine

from celery_outbox import Outbox, PermanentError, RetryPolicy
from celery_outbox.testing import kill_at_environment
from tests.acceptance import canvas, endings
from tests.wait import wait_for_file

FOLDER = Path(os.environ["SHOP_FOLDER"])

app = Celery("shop", broker=os.environ["SHOP_BROKER"], task_cls="celery_outbox:OutboxTask")
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))
app.conf.outbox_database_url = os.environ["SHOP_DATABASE"]
if "SHOP_TIMEOUT" in os.environ:
    app.conf.outbox_database_timeout = float(os.environ["SHOP_TIMEOUT"])
app.conf.outbox_result_store = f"file://{FOLDER}/results"


def _used_engine() -> Engine | None:
    """An engine whose pool has a connection already, when a worker forks."""
    if "SHOP_USED_ENGINE" not in os.environ:
        return None
    engine = create_engine(os.environ["SHOP_DATABASE"])
    with engine.connect() as connection:
        backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    (FOLDER / "parent-backend").write_text(str(backend))
    return engine


outbox = Outbox(app, engine=_used_engine())
app.conf.task_queues = [outbox.queue("celery"), outbox.queue("bare", queue_arguments={})]
if "SHOP_QUORUM_QUEUE" in os.environ:
    # Without the outbox's dead letters; Celery has a setting for such queues since 5.6 only.
    plain = Queue(os.environ["SHOP_QUORUM_QUEUE"], queue_arguments={"x-queue-type": "quorum"})
    app.conf.task_queues.append(plain)
kill_at_environment()
if "SHOP_FILE_LIMIT" in os.environ:
    # A file that reaches it cannot grow, as on a disk that is full.
    limit = int(os.environ["SHOP_FILE_LIMIT"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


#: Not shared: a test process makes this app once per test, and shared tasks go into all.
task = partial(app.task, bind=True, shared=False)


def note_run(job_id: str | None, what: str = "run") -> None:
    """Leave a trace of an effect: one line, appended in one write."""
    with (FOLDER / "runs").open("a") as runs:
        runs.write(f"{job_id} {what}\n")


@task(name="shop.export", result_key="reports/{job_id}.csv")
def export(self: Any, rows: int) -> str:
    """Write a report."""
    note_run(self.request.id)
    return self.write_result(f"{number}\n".encode() for number in range(rows))


@task(name="shop.add")
def add(self: Any, x: Any, y: Any) -> Any:
    """Return a result."""
    note_run(self.request.id)
    return x + y


@task(name="shop.limited", rate_limit="1/h")
def limited(self: Any) -> None:
    """Run once an hour, unless somebody changes the rate."""
    note_run(self.request.id)


@task(name="shop.fail", retry_policy=RetryPolicy(3, delay=0.05, jitter=0))
def fail(self: Any, text: str) -> None:
    """Fail with an error that may pass."""
    note_run(self.request.id)
    raise ConnectionError(text)


@task(name="shop.refuse")
def refuse(self: Any, text: str) -> None:
    """Fail with an error that will not pass."""
    note_run(self.request.id)
    raise PermanentError(text)


def _wait_for(self: Any, name: str, seconds: float = 30.0) -> str:
    note_run(self.request.id)
    wait_for_file(FOLDER / name, seconds)
    return name


@task(name="shop.wait_for")
def wait_for(self: Any, name: str, seconds: float = 30.0) -> str:
    """Run until a file appears."""
    return _wait_for(self, name, seconds)


@task(name="shop.wait_once", max_attempts=1)
def wait_once(self: Any, name: str, seconds: float = 30.0) -> str:
    """Run until a file appears, in one attempt."""
    return _wait_for(self, name, seconds)


@task(name="shop.refuse_after")
def refuse_after(self: Any, name: str) -> None:
    """Run until a file appears, and fail with an error that will not pass."""
    _wait_for(self, name)
    raise PermanentError(name)


payments = Table(
    "payments",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("job", String(255), nullable=False),
)


@task(name="shop.pay", transactional=True)
def pay(self: Any, wait_for: str | None = None, letter: bool = True) -> str:
    """Write into the database, and enqueue a letter, in the job's own transaction."""
    note_run(self.request.id)
    self.session.execute(payments.insert().values(job=self.request.id))
    if letter:
        add.apply_async((1, 2), task_id=f"letter-{self.request.id}")
    if wait_for is not None:
        wait_for_file(FOLDER / wait_for, 30.0)
    return "paid"


@task(name="shop.find_payment", max_attempts=1)
def find_payment(self: Any, number: int) -> str:
    """Look for the row of which the call's transaction has told."""
    note_run(self.request.id)
    with outbox.engine.connect() as connection:
        found = payments.select().where(payments.c.id == number)
        return str(connection.execute(found).one().job)


@task(name="shop.insist", max_retries=5)
def insist(self: Any) -> int:
    """Ask for five retries, then succeed."""
    note_run(self.request.id)
    if self.request.retries < 5:
        raise self.retry(countdown=0.05)
    return self.request.retries


@task(name="shop.wait_and_retry")
def wait_and_retry(self: Any, name: str, seconds: float = 120.0) -> int:
    """Run until a file appears, and then ask for a retry; the second time succeed."""
    note_run(self.request.id)
    if self.request.retries == 0:
        wait_for_file(FOLDER / name, seconds)
        raise self.retry(countdown=0.05)
    return self.request.retries


@task(
    name="shop.autoretry",
    autoretry_for=(ConnectionError,),
    retry_backoff=False,
    default_retry_delay=0.05,
    max_retries=1,
)
def autoretry(self: Any) -> None:
    """Fail; Celery asks for one retry."""
    note_run(self.request.id)
    raise ConnectionError


@task(name="shop.come_back")
def come_back(self: Any, at: str) -> None:
    """Ask at first to be run again at an absolute time, by hand."""
    note_run(self.request.id)
    if self.request.retries == 0:
        raise Retry(when=datetime.fromisoformat(at))


@task(name="shop.pickled", serializer="pickle")
def pickled(self: Any, values: Any) -> None:
    """Get what workers of this app do not accept."""
    note_run(self.request.id)


@task(name="shop.bare", base=Task)
def bare(self: Any, value: Any = None) -> Any:
    """Be a task without the outbox."""
    note_run(self.request.id)
    return value


endings.register(task, note_run)
canvas.register(task, note_run)
