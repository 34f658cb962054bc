"""A worker, or a process of its pool, ends at a bad moment; or it is told to drop a job."""

from __future__ import annotations

import signal

import pytest

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually


def test_a_pool_process_killed_before_it_claimed_the_job_is_counted(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="killer")
    system.shop.add.apply_async((1, 2), task_id="next")
    system.dispatcher()
    system.worker("-c", "1", pool="prefork", fault="execute.on_delivery", OUTBOX_FAULT_JOB="killer")

    # A worker without an event loop, as on the filesystem, looks after its pool now and then.
    job = system.reaches("killer", "quarantined", deadline=120)
    assert (job.attempt, job.reason, system.runs("killer")) == (3, "lost_worker", 0)
    system.reaches("next", "succeeded")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    eventually(lambda: system.depth("celery") == 0)


def test_a_warm_shutdown_keeps_the_lease_of_the_last_job(system: System) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    ending = system.worker("-c", "1", pool="prefork")
    first = system.reaches("slow", "running").lease
    assert first is not None

    ending.send(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in ending.log())
    system.worker()
    # Several times the length of a lease.
    for _ in range(3):
        until = system.job("slow").lease.until
        eventually(lambda before=until: system.job("slow").lease.until > before)
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, system.runs("slow")) == (1, 1)
    assert ending.wait() == 0


@on_rabbitmq
def test_a_revoked_job_is_cancelled(system: System) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="first")
    system.shop.add.apply_async((1, 2), task_id="unwanted", countdown=1)
    system.dispatcher()
    system.worker("-c", "1", pool="prefork")
    system.reaches("first", "running")

    system.shop.app.control.revoke("unwanted")
    (system.folder / "go").touch()

    assert system.reaches("unwanted", "cancelled").attempt == 0
    assert system.runs("unwanted") == 0


def test_a_payload_that_workers_do_not_accept_is_quarantined(system: System) -> None:
    system.shop.pickled.apply_async(({1, 2},), task_id="pickled")
    system.dispatcher()
    system.worker()

    job = system.reaches("pickled", "quarantined")
    assert (job.reason, system.runs("pickled")) == ("undecodable", 0)
    eventually(lambda: system.depth("outbox.quarantine") == 1)


@pytest.mark.parametrize("system", ["postgresql-redis"], indirect=True)
def test_a_message_that_the_broker_lost_is_published_again(system: System) -> None:
    settings = system.environment["SHOP_SETTINGS"]
    soon = settings.replace("{", '{"outbox_republish_after": 1.0, ', 1)
    system.shop.add.apply_async((1, 2), task_id="lost")
    system.dispatcher("--once").wait()
    assert system.take("celery") is not None

    system.dispatcher(SHOP_SETTINGS=soon)
    eventually(lambda: "republished" in system.events("lost"))
    system.worker()

    assert system.reaches("lost", "succeeded").attempt == 1
    assert system.runs("lost") == 1
