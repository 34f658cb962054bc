"""What a finished job sends is not lost with its worker: the steps of a chain, and callbacks."""

from __future__ import annotations

import signal

import pytest
from celery import chain

from celery_outbox import UnknownJob
from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.system import System
from tests.wait import eventually


@pytest.mark.parametrize("system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True)
def test_each_step_of_a_chain_runs_once_whose_worker_is_killed_before_it_sends_the_next(
    system: System,
) -> None:
    add = system.shop.add
    steps = [
        add.s(1, 2).set(task_id="first", link=add.s(100).set(task_id="linked")),
        add.s(10).set(task_id="second"),
        add.s(20).set(task_id="third"),
    ]
    chain(*steps).apply_async()
    system.dispatcher()

    # After the settle, before anything is sent.
    killed = system.worker(fault="execute.after_settle", OUTBOX_FAULT_JOB="first")
    assert killed.wait(60) == -signal.SIGKILL
    assert system.job("first").state == "succeeded"
    for name in ("linked", "second", "third"):
        with pytest.raises(UnknownJob):
            system.job(name)
    system.redeliver()
    # When the next step is recorded, and the message of this one is not acknowledged.
    killed = system.worker(fault="record.after_commit", OUTBOX_FAULT_JOB="third")
    assert killed.wait(60) == -signal.SIGKILL
    assert system.job("second").state == "succeeded"
    system.redeliver()
    system.worker()

    for name, result in {"first": 3, "linked": 103, "second": 13, "third": 33}.items():
        job = system.reaches(name, "succeeded")
        assert (job.attempt, system.runs(name)) == (1, 1), name
        assert _result(system, name) == result
    for name in ("first", "second"):
        eventually(lambda name=name: system.job(name).deliveries >= 2)
    eventually(lambda: system.depth("celery") == 0)
    assert len(system.outbox.control.find()) == 4


def _result(system: System, job_id: str) -> object:
    job = system.outbox.database.read(lambda c: jobs.get(c, system.outbox.tables, job_id))
    assert job is not None
    return decode_result(job.result, job.result_type)
