"""A transactional body in real workers: its effect is there once, whatever dies and when."""

from __future__ import annotations

import os
import signal

import pytest
from sqlalchemy import func, select

from tests.acceptance.system import System
from tests.wait import eventually


@pytest.fixture(autouse=True)
def table(system: System) -> None:
    """The shop's own table, in the database that holds the outbox."""
    system.shop.payments.metadata.create_all(system.outbox.engine)


def paid(system: System, job_id: str) -> int:
    """How many payments of a job are committed."""
    payments = system.shop.payments
    statement = select(func.count()).where(payments.c.job == job_id)
    with system.outbox.engine.connect() as connection:
        return int(connection.scalar(statement) or 0)


@pytest.mark.parametrize(
    ("fault", "paid_at_death", "attempts"),
    [("execute.before_commit", 0, 2), ("execute.after_commit", 1, 1)],
)
def test_a_worker_killed_around_the_commit_pays_once(
    system: System, fault: str, paid_at_death: int, attempts: int
) -> None:
    system.shop.pay.apply_async(task_id="pay-1")
    system.dispatcher()
    killed = system.worker(fault=fault, OUTBOX_FAULT_JOB="pay-1")
    assert killed.wait() == -signal.SIGKILL
    assert paid(system, "pay-1") == paid_at_death
    system.redeliver()
    system.worker()

    assert system.reaches("pay-1", "succeeded").attempt == attempts
    system.reaches("letter-pay-1", "succeeded")
    # A message that came back, and one from the rescue, if that was faster.
    eventually(lambda: system.job("pay-1").deliveries >= 2)
    eventually(lambda: system.depth("celery") == 0)
    assert (paid(system, "pay-1"), system.runs("letter-pay-1")) == (1, 1)
    assert system.runs("pay-1") == attempts


@pytest.mark.parametrize("system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True)
def test_a_frozen_worker_that_comes_back_commits_nothing(system: System) -> None:
    # Without a letter: a row with the same key would make the second attempt wait for the first.
    system.shop.pay.apply_async(("go", False), task_id="pay-1")
    system.dispatcher()
    # A broker hands a frozen worker as many messages as it has asked for.
    one = ("--concurrency", "1", "--prefetch-multiplier", "1")
    frozen = system.worker(*one, "--hostname", "frozen@%h")
    eventually(lambda: system.runs("pay-1") == 1)
    os.kill(frozen.pid, signal.SIGSTOP)
    eventually(lambda: "rescued" in system.events("pay-1"))
    (system.folder / "go").touch()
    system.worker(*one, "--hostname", "other@%h")
    system.reaches("pay-1", "succeeded")
    os.kill(frozen.pid, signal.SIGCONT)

    eventually(lambda: "stale" in system.events("pay-1"))
    assert (system.job("pay-1").attempt, paid(system, "pay-1")) == (2, 1)
