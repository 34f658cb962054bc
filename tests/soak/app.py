"""The Celery app that the soak's workers and dispatchers run."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

from celery import Celery
from sqlalchemy import Column, Integer, MetaData, String, Table

from celery_outbox import Outbox, PermanentError, RetryPolicy
from tests.soak.load import MEMBERS, child_of

#: Short, so that what has to be waited for is waited for often; the proportions are those of the
#: defaults.
SETTINGS: dict[str, Any] = {
    "outbox_lease": 6.0,
    "outbox_heartbeat_interval": 1.5,
    "outbox_publish_timeout": 3.0,
    "outbox_dispatch_lease": 6.0,
    "outbox_poll_interval": 0.5,
    "outbox_maintenance_interval": 1.0,
    "outbox_republish_after": 15.0,
    "outbox_backoff_max": 1.0,
    "outbox_database_timeout": 20.0,
    "outbox_settle_timeout": 60.0,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
    "worker_proc_alive_timeout": 20.0,
}

#: Attempts that chaos cannot use up, for jobs that would succeed without it.
PATIENT = RetryPolicy(max_attempts=100, delay=0.2, factor=1.0)
#: Attempts of jobs that never succeed.
LIMITED = RetryPolicy(max_attempts=3, delay=0.2, factor=1.0)

metadata = MetaData()
#: Written in the job's own transaction: once for a job that succeeded, or the soak has failed.
effects = Table(
    "soak_effect",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("job", String(255), nullable=False, index=True),
)
#: Written outside of it, as a call to another service would be: once for each run of a body.
runs = Table(
    "soak_run",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("job", String(255), nullable=False, index=True),
)

app = Celery("soak", broker=os.environ["SOAK_BROKER"], task_cls="celery_outbox:OutboxTask")
app.conf.update(SETTINGS)
app.conf.outbox_database_url = os.environ["SOAK_DATABASE"]
outbox = Outbox(app)
app.conf.task_queues = [outbox.queue("celery")]

task = partial(app.task, bind=True, shared=False, retry_policy=PATIENT)


def note_run(job_id: str) -> None:
    """Leave a trace that no rollback undoes."""
    with outbox.engine.begin() as connection:
        connection.execute(runs.insert().values(job=job_id))


@task(name="soak.short")
def short(self: Any, number: int) -> int:
    """Return at once."""
    note_run(self.request.id)
    return number


@task(name="soak.long")
def long(self: Any, seconds: float) -> float:
    """Take longer than a lease without a heartbeat would last."""
    note_run(self.request.id)
    time.sleep(seconds)
    return seconds


@task(name="soak.retry")
def retry(self: Any, failures: int) -> int:
    """Fail so many times with an error that may pass."""
    note_run(self.request.id)
    if self.request.retries < failures:
        raise ConnectionError
    return failures


@task(name="soak.insist", max_retries=None)
def insist(self: Any, retries: int) -> int:
    """Ask Celery for so many retries."""
    note_run(self.request.id)
    if self.request.retries < retries:
        raise self.retry(countdown=0.1)
    return retries


@task(name="soak.refuse", retry_policy=LIMITED)
def refuse(self: Any) -> None:
    """Fail with an error that will not pass."""
    note_run(self.request.id)
    raise PermanentError


@task(name="soak.exhaust", retry_policy=LIMITED)
def exhaust(self: Any) -> None:
    """Fail each time with an error that might have passed."""
    note_run(self.request.id)
    raise ConnectionError


@task(name="soak.poison", retry_policy=LIMITED)
def poison(self: Any) -> None:
    """Kill the process that runs it."""
    note_run(self.request.id)
    os.kill(os.getpid(), signal.SIGKILL)


@task(name="soak.pay", transactional=True)
def pay(self: Any) -> str:
    """Write in the job's own transaction."""
    note_run(self.request.id)
    self.session.execute(effects.insert().values(job=self.request.id))
    return "paid"


@task(name="soak.gather", transactional=True)
def gather(self: Any, numbers: list[int]) -> str:
    """Write once all members of a header have ended."""
    note_run(self.request.id)
    if numbers != list(range(MEMBERS)):
        raise PermanentError(f"the header's results are {numbers}")
    self.session.execute(effects.insert().values(job=self.request.id))
    return "gathered"


@task(name="soak.slow_pay", transactional=True)
def slow_pay(self: Any, seconds: float) -> str:
    """Write early in the job's own transaction, and be found in the middle of it."""
    note_run(self.request.id)
    self.session.execute(effects.insert().values(job=self.request.id))
    time.sleep(seconds)
    return "paid"


@task(name="soak.block")
def block(self: Any) -> str:
    """Write in a transaction at the end of the body."""
    note_run(self.request.id)
    with self.transaction(result="paid") as session:
        session.execute(effects.insert().values(job=self.request.id))
    return "paid"


@task(name="soak.order", transactional=True)
def order(self: Any, children: int) -> str:
    """Write, and enqueue other jobs, in the job's own transaction."""
    note_run(self.request.id)
    self.session.execute(effects.insert().values(job=self.request.id))
    for number in range(children):
        pay.apply_async(task_id=child_of(self.request.id, number))
    return "ordered"
