"""Who holds a job, and for how long: heartbeats, silent workers, and connections across a fork."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from datetime import datetime, timezone

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError
from sqlalchemy import select

from celery_outbox import JobQuarantined
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually


@on_rabbitmq
def test_processes_of_a_worker_never_share_a_database_connection(system: System) -> None:
    who = system.shop.app.tasks["shop.who"]
    for number in range(100):
        who.apply_async(task_id=f"who-{number}")
    system.dispatcher()
    worker = system.worker(
        "-c", "4", "--max-tasks-per-child", "10", pool="prefork", SHOP_USED_ENGINE="yes"
    )
    eventually(lambda: len(answers(system)) == 100, deadline=90)
    assert len(workers(system)) == 1
    assert worker.terminate(60) == 0
    assert workers(system) == []

    for number in range(8):
        who.apply_async(task_id=f"small-{number}")
    system.worker("-c", "2", "--max-memory-per-child", "1", pool="prefork", SHOP_USED_ENGINE="yes")
    eventually(lambda: len(answers(system)) == 108, deadline=90)

    processes = defaultdict(set)
    for process, backend in answers(system).values():
        processes[backend].add(process)
    assert max(len(users) for users in processes.values()) == 1
    assert int((system.folder / "parent-backend").read_text()) not in processes
    # Each process ran ten at the most, and one where its memory was too much.
    assert len(set.union(*processes.values())) >= 10 + 8
    assert all(system.job(name).attempt == 1 for name in answers(system))


@on_rabbitmq
def test_a_worker_that_was_paused_past_its_lease_changes_nothing(system: System) -> None:
    system.shop.wait_for.apply_async(("go", 120.0), task_id="slow")
    system.dispatcher()
    # One message at a time: the broker would give a paused worker more than it runs.
    one_by_one = ("-c", "1", "--prefetch-multiplier", "1")
    paused = system.worker("-n", "one@%h", *one_by_one)
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)
    first = system.job("slow").lease

    paused.send(signal.SIGSTOP)
    eventually(lambda: "rescued" in system.events("slow"))
    # On the same host, as after a restart. RabbitMQ does not let it have the same node name while
    # the first is connected.
    system.worker("-n", "two@%h", *one_by_one)
    eventually(lambda: system.runs("slow") == 2)
    second = system.job("slow").lease
    assert second.by != first.by
    assert second.token == first.token + 1
    assert len({(row.hostname, row.id) for row in workers(system)}) == 2
    (system.folder / "go").touch()
    done = system.reaches("slow", "succeeded")
    assert (done.attempt, done.lease) == (2, None)

    paused.send(signal.SIGCONT)
    eventually(lambda: system.events("slow")[-1] in ("stale", "duplicate"))
    eventually(lambda: "stale" in system.events("slow"))
    after = system.job("slow")
    assert (after.state, after.attempt, after.finished_at) == ("succeeded", 2, done.finished_at)
    assert system.runs("slow") == 2
    eventually(lambda: system.depth("celery") == 0)


@pytest.mark.parametrize("pool", ["solo", "gevent"])
@on_rabbitmq
def test_a_body_longer_than_its_lease_keeps_it(system: System, pool: str) -> None:
    names = ["a"] if pool == "solo" else ["a", "b"]
    for name in names:
        system.shop.wait_for.apply_async(("go", 120.0), task_id=name)
    system.dispatcher()
    system.worker("-c", "2", pool=pool)
    first = {name: system.reaches(name, "running").lease.until for name in names}

    eventually(lambda: datetime.now(timezone.utc) > max(first.values()))
    for name in names:
        # One update keeps them all.
        assert eventually(lambda name=name: system.job(name).lease.until > first[name])
    assert len(workers(system)) == 1
    (system.folder / "go").touch()
    for name in names:
        assert system.reaches(name, "succeeded").attempt == 1


def answers(system: System) -> dict[str, list[int]]:
    """The results of the jobs that have one, by job id."""
    job = system.outbox.tables.job
    with system.outbox.engine.connect() as connection:
        rows = connection.execute(select(job.c.id, job.c.result).where(job.c.state == "succeeded"))
        return {row.id: json.loads(row.result) for row in rows}


def workers(system: System) -> list:
    """The heartbeat rows."""
    with system.outbox.engine.connect() as connection:
        return list(connection.execute(select(system.outbox.tables.worker)))


@on_rabbitmq
def test_a_caller_hears_of_a_job_that_went_with_the_last_worker_and_so_does_its_error_callback(
    system: System, redis_url: str
) -> None:
    settings = json.loads(system.environment["SHOP_SETTINGS"]) | {"result_backend": redis_url}
    told = {"SHOP_SETTINGS": json.dumps(settings)}
    results = Celery("results", backend=redis_url, set_as_current=False)
    callback = system.shop.app.tasks["canvas.listed"].s()
    system.shop.wait_once.apply_async(("never", 300.0), task_id="last", link_error=callback)
    system.shop.add.apply_async((1, 2), task_id="late", expires=1)
    system.dispatcher(**told)
    worker = system.worker("-c", "1", "--prefetch-multiplier", "1", **told)
    eventually(lambda: system.runs("last") == 1, deadline=60)
    worker.kill()

    # There is no worker that could say so.
    with pytest.raises(JobQuarantined, match="lost_worker"):
        results.AsyncResult("last").get(timeout=60)
    with pytest.raises(TaskRevokedError):
        results.AsyncResult("late").get(timeout=60)
    assert system.job("last").reason == "lost_worker"
    eventually(lambda: system.outbox.control.find(task="canvas.listed"))

    # The broker delivers the message of the lost job again, and the worker tells the same.
    system.worker(**told)
    [called] = system.outbox.control.find(task="canvas.listed")
    system.reaches(called.id, "succeeded", deadline=60)
    eventually(lambda: system.depth("celery") == 0, deadline=60)
    eventually(lambda: system.job("last").deliveries == 2, deadline=60)
    assert len(system.outbox.control.find(task="canvas.listed")) == 1
    assert (system.runs("last"), system.runs(called.id)) == (1, 1)
    assert results.AsyncResult("last").state == "FAILURE"
    results.close()
