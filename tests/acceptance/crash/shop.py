"""The app whose processes die, built from the environment alone, and what those processes do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from sqlalchemy import Column, Integer, MetaData, String, Table
from sqlalchemy.orm import Session

from celery_outbox import Outbox, PermanentError, testing
from celery_outbox.queues import is_rabbitmq

#: The queue of all tasks, whose rejected messages RabbitMQ dead-letters; and one where it does not.
QUEUE, BARE = "work", "bare"

#: Seconds of the hard time limit of ``shop.slow``.
TIME_LIMIT = 4


@dataclass(frozen=True)
class Shop:
    """The app, its outbox and its tasks, by the names of their functions."""

    app: Celery
    outbox: Outbox
    tasks: dict[str, Any]

    def ask_for(self, task: str, job_id: str, **options: Any) -> None:
        """Record a job in a transaction of its own."""
        self.tasks[task].apply_async(task_id=job_id, **options)


def build(environment: Mapping[str, str]) -> Shop:
    """Make the app of a process, or of a thread of the test."""
    folder = Path(environment["SHOP_FOLDER"])
    app = Celery(
        "shop",
        broker=environment["SHOP_BROKER"],
        task_cls="celery_outbox:OutboxTask",
        set_as_current=False,
    )
    app.conf.update(json.loads(environment["SHOP_SETTINGS"]))
    app.conf.outbox_database_url = environment["SHOP_DATABASE"]
    app.conf.outbox_result_store = f"file://{folder}/results"
    outbox = Outbox(app)
    kind = environment["SHOP_QUEUE_TYPE"]
    prefix = environment["SHOP_PREFIX"]
    arguments = {"x-queue-type": kind} if is_rabbitmq(app) else {}
    bare = Exchange(prefix + BARE, type="direct", durable=True)
    app.conf.task_queues = [
        outbox.queue(prefix + QUEUE, queue_arguments=arguments),
        Queue(prefix + BARE, bare, prefix + BARE, durable=True, queue_arguments=arguments),
    ]
    app.conf.task_default_queue = prefix + QUEUE
    testing.kill_at_environment()
    return Shop(app, outbox, _tasks(app, folder, prefix))


def celery(*arguments: str) -> None:
    """Be ``celery -A shop ARGUMENTS``."""
    build(os.environ).app.start(argv=arguments)


def record(task: str, job_id: str) -> None:
    """Be a web process that records one job, in a transaction of the outbox's own."""
    build(os.environ).ask_for(task, job_id)


def record_within(task: str, job_id: str) -> None:
    """Be a web process that records one job in a transaction of its own."""
    shop = build(os.environ)
    with Session(shop.outbox.engine) as session, session.begin(), shop.outbox.use(session):
        shop.ask_for(task, job_id)


def bookings(prefix: str) -> Table:
    """A table of the application's own."""
    columns = (Column("id", Integer, primary_key=True), Column("job", String(255)))
    return Table(f"{prefix}booking", MetaData(), *columns)


def _tasks(app: Celery, folder: Path, prefix: str) -> dict[str, Any]:
    task = partial(app.task, bind=True, shared=False)

    def work(self: Any) -> str:
        """One effect on another side that knows the idempotency key, and one result."""
        testing.in_body(self.request.id)
        (folder / "effects").mkdir(exist_ok=True)
        (folder / "effects" / str(self.idempotency_key)).touch()
        testing.after_effect(self.request.id)
        return self.write_result([b"done\n"])

    def note_run(self: Any) -> None:
        with (folder / "runs").open("a") as runs:
            runs.write(f"{self.request.id}\n")

    @task(name="shop.export", result_key="reports/{job_id}.csv")
    def export(self: Any) -> str:
        """Succeed."""
        note_run(self)
        return work(self)

    @task(name="shop.last", result_key="reports/{job_id}.csv", max_attempts=1)
    def last(self: Any) -> str:
        """Succeed, in the only attempt that it has."""
        note_run(self)
        return work(self)

    @task(name="shop.stumble", result_key="reports/{job_id}.csv")
    def stumble(self: Any) -> str:
        """Fail in the first attempt, before there is an effect."""
        note_run(self)
        if self.request.retries == 0:
            raise ConnectionError
        return work(self)

    @task(name="shop.come_back", result_key="reports/{job_id}.csv")
    def come_back(self: Any) -> str:
        """Ask for a retry in the first attempt."""
        note_run(self)
        if self.request.retries == 0:
            raise self.retry(countdown=0.05)
        return work(self)

    @task(name="shop.book", transactional=True)
    def book(self: Any) -> str:
        """Write a row in the job's own transaction, which is all its effect."""
        note_run(self)
        self.session.execute(bookings(prefix).insert().values(job=self.request.id))
        return "booked"

    @task(name="shop.refuse")
    def refuse(self: Any) -> None:
        """Fail for good."""
        note_run(self)
        raise PermanentError

    @task(name="shop.slow", result_key="reports/{job_id}.csv", time_limit=TIME_LIMIT)
    def slow(self: Any) -> str:
        """Run into the hard time limit in the first attempt."""
        note_run(self)
        if self.request.retries == 0:
            time.sleep(600)
        return work(self)

    found = (export, last, stumble, come_back, book, refuse, slow)
    return {each.__name__: each for each in found}
