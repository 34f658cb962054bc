"""Attempts: retried from the database, deferred, adopted, lost and stopped."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from celery import Celery

from celery_outbox.dispatch.publisher import Outcome
from celery_outbox.dispatch.wire import build
from celery_outbox.execute.payload import decode_result
from celery_outbox.queues import consumes_quorum_queues
from celery_outbox.store import job as jobs
from celery_outbox.store.messages import TASK, Message
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually


def test_self_retry_is_a_row_in_the_database(system: System) -> None:
    system.shop.insist.apply_async(task_id="insist-1")
    system.dispatcher()
    system.worker()

    job = system.reaches("insist-1", "succeeded")
    assert (job.attempt, system.runs("insist-1")) == (6, 6)
    assert system.events("insist-1").count("retrying") == 5
    eventually(lambda: system.depth("celery") == 0)


@on_rabbitmq
def test_retries_with_a_countdown_go_on_on_a_quorum_queue(
    system: System, rabbitmq_api: RabbitmqApi
) -> None:
    system.shop.insist.apply_async(task_id="insist-1", countdown=0.05)
    system.dispatcher()
    system.worker()

    job = system.reaches("insist-1", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("insist-1")) == (6, 6, 6)
    # Celery 5.4 cannot consume the other kind.
    kind = "quorum" if consumes_quorum_queues() else "classic"
    assert rabbitmq_api.kind("celery") == kind
    eventually(lambda: system.depth("celery") == 0)


def test_autoretry_keeps_celerys_limit_and_ends_in_quarantine(system: System) -> None:
    system.shop.autoretry.apply_async(task_id="auto-1")
    system.dispatcher()
    system.worker()

    job = system.reaches("auto-1", "quarantined")
    assert (job.attempt, system.runs("auto-1")) == (2, 2)
    assert (job.reason, job.error_code) == ("attempts_exhausted", "ConnectionError")


def test_a_countdown_waits_in_the_database(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="later", countdown=300)
    system.shop.add.apply_async((1, 2), task_id="now")
    system.dispatcher()
    system.worker()

    system.reaches("now", "succeeded")
    job = system.job("later")
    assert (job.state, job.published_at, job.deliveries) == ("queued", None, 0)
    assert system.depth("celery") == 0
    assert timedelta(seconds=200) < job.available_at - datetime.now(timezone.utc)


def test_an_expired_job_never_runs(system: System) -> None:
    past = datetime.now(timezone.utc) - timedelta(seconds=5)
    system.shop.add.apply_async((1, 2), task_id="late", expires=past)
    system.shop.add.apply_async((1, 2), task_id="next")
    system.dispatcher()
    system.worker()

    system.reaches("next", "succeeded")
    system.reaches("late", "expired")
    assert system.runs("late") == 0


def test_a_second_delivery_while_the_job_runs_is_deferred_and_not_run(system: System) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    # One message at a time: the second is left for the other worker.
    one_by_one = ("-c", "1", "--prefetch-multiplier", "1")
    system.worker("-n", "one@%h", *one_by_one)
    system.reaches("slow", "running")

    _publish_again(system, "slow")
    system.worker("-n", "two@%h", *one_by_one)
    eventually(lambda: "deferred" in system.events("slow"))
    eventually(lambda: system.depth("celery") == 0)
    # The lease is kept by the heartbeat for longer than it lasts, and the row waits for it.
    first = system.job("slow").lease
    assert first is not None
    eventually(lambda: datetime.now(timezone.utc) > first.until)
    assert system.job("slow").state == "running"
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, system.runs("slow")) == (1, 1)


def test_a_plain_message_of_a_client_without_the_outbox_is_adopted(system: System) -> None:
    plain = _plain_client(system)
    plain.send_task("shop.add", (2, 3), task_id="plain-1")
    system.worker()

    job = system.reaches("plain-1", "succeeded")
    assert (job.task, job.attempt, system.runs("plain-1")) == ("shop.add", 1, 1)
    assert system.events("plain-1") == ["adopted", "claimed", "succeeded"]


def test_a_plain_message_that_fails_is_retried_from_the_database(system: System) -> None:
    plain = _plain_client(system)
    plain.send_task("shop.fail", ("away",), task_id="plain-1")
    system.dispatcher()
    system.worker()

    job = system.reaches("plain-1", "quarantined")
    assert (job.attempt, system.runs("plain-1")) == (3, 3)


def test_a_cancelled_job_does_not_run(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="unwanted")
    system.dispatcher("--once").wait()
    system.shop.add.apply_async((1, 2), task_id="early")
    for job_id in ("unwanted", "early"):
        system.outbox.control.cancel(job_id)
    system.dispatcher()
    system.worker()

    eventually(lambda: system.job("unwanted").deliveries == 1)
    eventually(lambda: system.depth("celery") == 0)
    for job_id in ("unwanted", "early"):
        assert (system.job(job_id).state, system.runs(job_id)) == ("cancelled", 0)
    assert (system.job("early").deliveries, system.job("early").published_at) == (0, None)


def test_a_killed_pool_process_is_counted_and_another_attempt_follows(system: System) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    worker = system.worker("-c", "1", pool="prefork")
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    os.kill(_pool_process(worker.pid), signal.SIGKILL)
    eventually(lambda: system.runs("slow") == 2)
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert job.attempt == 2
    eventually(lambda: system.depth("celery") == 0)
    assert system.depth("outbox.quarantine") == 0


@on_rabbitmq
def test_a_task_that_kills_its_process_each_time_is_quarantined_after_three(
    system: System,
) -> None:
    system.shop.export.apply_async((1,), task_id="killer")
    system.shop.add.apply_async((1, 2), task_id="next")
    system.dispatcher()
    system.worker("-c", "1", pool="prefork", fault="execute.after_claim", OUTBOX_FAULT_JOB="killer")

    job = system.reaches("killer", "quarantined")
    assert (job.attempt, job.reason) == (3, "lost_worker")
    assert _attempts(system, "killer") == [
        *[("claimed", None), ("retrying", "lost_worker")] * 2,
        ("claimed", None),
        ("quarantined", "lost_worker"),
    ]
    system.reaches("next", "succeeded")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    eventually(lambda: system.depth("celery") == 0)


@pytest.mark.parametrize("pool", ["solo", "threads", "prefork"])
@on_rabbitmq
def test_every_pool_runs_jobs_under_the_guard(system: System, pool: str) -> None:
    for number in range(20):
        system.shop.add.apply_async((number, 1), task_id=f"add-{number}")
    system.dispatcher()
    system.worker("-c", "2", pool=pool)

    for number in range(20):
        assert system.reaches(f"add-{number}", "succeeded").attempt == 1
        assert system.runs(f"add-{number}") == 1


def test_arguments_arrive_as_they_were_sent_and_are_not_in_the_broker(system: System) -> None:
    system.shop.add.apply_async(("sec\x00ret", "-ärger"), task_id="add-1")
    system.dispatcher("--once").wait()
    message = system.take("celery")
    assert "ret" not in str(message.body)
    assert "ärger" not in str(message.headers)
    _publish_again(system, "add-1")

    system.worker()

    system.reaches("add-1", "succeeded")
    with system.outbox.engine.connect() as connection:
        row = jobs.get(connection, system.outbox.tables, "add-1")
    assert row is not None
    assert decode_result(row.result, row.result_type) == "sec\x00ret-ärger"


def _publish_again(system: System, job_id: str) -> None:
    """Put the message of a job into the broker once more, past the outbox."""
    with system.outbox.engine.connect() as connection:
        job = jobs.get(connection, system.outbox.tables, job_id)
    assert job is not None
    facts = {
        name: getattr(job, name) for name in Message.__dataclass_fields__ if hasattr(job, name)
    }
    message = Message(**{**facts, "id": 0, "kind": TASK, "job_id": job_id, "body": None})
    dispatcher = system.outbox.dispatcher()
    report = dispatcher._ready_publisher().publish([build(message, system.outbox.quarantine_queue)])
    dispatcher.close()
    assert report.outcomes == {0: Outcome.CONFIRMED}


def _attempts(system: System, job_id: str) -> list[tuple[str, str | None]]:
    """What the journal says of a job's attempts: the lines of workers, with their error codes."""
    return [
        (line.event, line.error_code)
        for line in system.outbox.control.journal(job_id)
        # A pool process that is killed at its time limit may say last that it has lost the lease.
        if line.event not in ("recorded", "published", "stale")
    ]


def _plain_client(system: System) -> Celery:
    app = Celery("plain", broker=system.environment["SHOP_BROKER"], set_as_current=False)
    app.conf.broker_transport_options = system.shop.app.conf.broker_transport_options
    app.conf.task_queues = [system.shop.app.amqp.queues["celery"]]
    return app


def _pool_process(worker_pid: int) -> int:
    children = Path(f"/proc/{worker_pid}/task/{worker_pid}/children").read_text().split()
    return int(children[0])
