"""Every process but the database has a clock that is ten minutes wrong: the database's decides."""

from __future__ import annotations

import json
import signal
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.processes import Processes
from tests.servers.faketime import wrong_clock
from tests.wait import eventually

pytestmark = pytest.mark.once

LEASE = timedelta(seconds=6)

#: What the web process of these tests asks for; its clock is as wrong as the others'.
CALLS = """
import sys, time
from tests.acceptance import app as shop

print("clock", time.time())
shop.add.apply_async((1, 2), task_id="soon", countdown=3)
shop.add.apply_async((1, 2), task_id="later", countdown=300)
shop.wait_for.apply_async(("go",), task_id="slow")
shop.fail.apply_async(("away",), task_id="fail")
shop.insist.apply_async(task_id="insist")
"""


@pytest.mark.parametrize("skew", [600, -600], ids=["fast", "slow"])
@on_rabbitmq
def test_no_job_runs_early_or_is_taken_from_a_living_worker_by_a_wrong_clock(
    system: System, processes: Processes, skew: int
) -> None:
    settings = json.loads(system.environment["SHOP_SETTINGS"])
    # Long enough for the heartbeats of a machine that has much to do.
    settings["outbox_lease"] = LEASE.total_seconds()
    right = {"SHOP_SETTINGS": json.dumps(settings)}
    wrong = {**right, **wrong_clock(skew)}
    before = _database_clock(system)
    web = processes.python("-c", CALLS, env={**system.environment, **wrong}, name="web")
    assert web.wait() == 0, web.log()
    after = _database_clock(system)
    clock = datetime.fromtimestamp(float(web.log().split()[1]), timezone.utc)
    assert abs(clock - after - timedelta(seconds=skew)) < timedelta(seconds=60), web.log()

    # A countdown is counted by the database's clock, an absolute time is one.
    for job_id, seconds in (("soon", 3), ("later", 300)):
        due = system.job(job_id).available_at - timedelta(seconds=seconds)
        assert before <= due <= after
    at = after + timedelta(seconds=4)
    system.shop.come_back.apply_async((at.isoformat(),), task_id="back")
    system.shop.add.apply_async((1, 2), task_id="valid", expires=after + timedelta(seconds=300))
    system.shop.add.apply_async((1, 2), task_id="late", expires=after - timedelta(seconds=1))

    dispatcher = system.dispatcher(**wrong)
    # Another, whose clock is wrong the other way, maintains as well.
    system.dispatcher(**right, **wrong_clock(-skew))
    worker = system.worker("-c", "3", pool="prefork", **wrong)
    lease = system.reaches("slow", "running").lease
    assert lease is not None
    assert lease.until <= _database_clock(system) + LEASE

    soon = system.reaches("soon", "succeeded")
    assert soon.started_at is not None
    assert soon.started_at >= soon.available_at
    failed = system.reaches("fail", "quarantined")
    assert (failed.attempt, system.runs("fail")) == (3, 3)
    assert (system.reaches("insist", "succeeded").attempt, system.runs("insist")) == (6, 6)
    assert system.reaches("valid", "succeeded").attempt == 1
    system.reaches("late", "expired")
    back = system.reaches("back", "succeeded")
    assert (back.attempt, system.runs("back")) == (2, 2)
    assert back.started_at is not None
    assert back.started_at >= at

    # By then only heartbeats can have kept it.
    eventually(lambda: _database_clock(system) > lease.until + timedelta(seconds=2))
    slow = system.job("slow")
    assert (slow.state, slow.attempt, system.runs("slow")) == ("running", 1, 1)
    later = system.job("later")
    assert (later.state, later.published_at, system.runs("later")) == ("queued", None, 0)
    for job_id in ("soon", "back", "slow"):
        times = [event.at for event in system.outbox.control.journal(job_id)]
        assert times == sorted(times)
        assert before <= times[0]
        assert times[-1] <= _database_clock(system)

    # Nor does it keep the job of a dead worker.
    worker.kill()
    (system.folder / "go").touch()
    system.worker(**wrong)
    assert system.reaches("slow", "succeeded").attempt == 2
    dispatcher.send(signal.SIGTERM)
    assert dispatcher.wait() == 0


@pytest.mark.parametrize("system", ["postgresql-redis"], indirect=True)
def test_a_worker_whose_clock_is_fast_takes_redis_messages_of_others_and_runs_none(
    system: System,
) -> None:
    settings = json.loads(system.environment["SHOP_SETTINGS"])
    settings["broker_transport_options"] = {"visibility_timeout": 300}
    patient = {"SHOP_SETTINGS": json.dumps(settings)}
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    # One message at a time: the copy is left for the other worker.
    one_by_one = ("-c", "1", "--prefetch-multiplier", "1")
    system.worker(*one_by_one, "-n", "one@%h", pool="prefork", **patient)
    system.reaches("slow", "running")

    # By its clock the visibility timeout of what is in flight is over.
    system.worker(*one_by_one, "-n", "two@%h", pool="prefork", **patient, **wrong_clock(600))
    eventually(lambda: "deferred" in system.events("slow"))
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, system.runs("slow")) == (1, 1)
    eventually(lambda: system.depth("celery") == 0)


def _database_clock(system: System) -> datetime:
    with system.outbox.engine.connect() as connection:
        now: datetime = connection.execute(text("SELECT statement_timestamp()")).scalar_one()
    return now.astimezone(timezone.utc)
