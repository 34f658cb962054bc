"""The broker delivers again what was not lost: no body runs twice for it, no result changes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.processes import Processes
from tests.proxy import Proxy
from tests.servers.rabbitmq import Rabbitmq
from tests.wait import eventually


@pytest.fixture
def own(
    processes: Processes, tmp_path: Path, postgresql_url: str, own_vhost: str
) -> Iterator[System]:
    """A system whose broker may be restarted, and told to be impatient."""
    folder = tmp_path / "shop"
    folder.mkdir()
    system = System("postgresql-rabbitmq", processes, folder, postgresql_url, own_vhost)
    yield system
    system.close()


@pytest.mark.parametrize("system", ["postgresql-redis"], indirect=True)
def test_redis_delivers_long_tasks_again_and_again_and_no_body_runs_twice(system: System) -> None:
    """Three workers; the bodies last for many visibility timeouts."""
    long = [f"long-{number}" for number in range(3)]
    system.dispatcher()
    options = ("-c", "4", "--prefetch-multiplier", "1")
    workers = []
    for number, job_id in enumerate(long):
        # A worker looks for messages that are overdue when it starts.
        workers.append(system.worker(*options, "-n", f"{number}@%h", pool="threads"))
        eventually(lambda worker=workers[-1]: " ready." in worker.log())
        system.shop.wait_for.apply_async(("go", 300.0), task_id=job_id)
        system.reaches(job_id, "running")
        eventually(lambda job_id=job_id: job_id in system.overdue())
    for job_id in long[:2]:
        eventually(lambda job_id=job_id: "deferred" in system.events(job_id))
    again = system.worker(*options, "-n", "again@%h", pool="threads")
    eventually(lambda: "deferred" in system.events(long[2]))
    # Each copy went at once, and none comes back while the lease is kept.
    eventually(lambda: system.overdue() == [] and system.depth("celery") == 0)
    (system.folder / "go").touch()

    for job_id in long:
        job = system.reaches(job_id, "succeeded")
        assert (job.attempt, system.runs(job_id)) == (1, 1)
        assert job.deliveries >= 2
    # The first body has lasted for three visibility timeouts.
    first = system.job(long[0])
    assert first.finished_at - first.started_at > 3 * timedelta(seconds=3)
    eventually(lambda: system.depth("celery") == 0)
    assert all(worker.alive for worker in (*workers, again))


@pytest.fixture
def impatient(own: System, own_rabbitmq: Rabbitmq) -> Iterator[System]:
    """A system whose broker closes a channel that has not acknowledged within a second."""
    own_rabbitmq.limit_delivery(1.0, tick=0.5)
    yield own
    own_rabbitmq.limit_delivery(1800.0)


def test_rabbitmq_closes_the_channel_under_a_long_task_and_nothing_runs_twice(
    impatient: System,
) -> None:
    system = impatient
    system.shop.wait_for.apply_async(("go", 300.0), task_id="long")
    system.dispatcher()
    worker = system.worker("-c", "1", pool="prefork")
    system.reaches("long", "running")
    # This one waits in the worker, behind the long one, and is not acknowledged either.
    system.shop.add.apply_async((1, 2), task_id="behind")

    # More than once: the copy has nobody to run it, and waits behind the first as well.
    eventually(lambda: worker.log().count("outbox.ack_overdue") >= 2, deadline=60)
    assert (system.job("long").state, system.runs("long")) == ("running", 1)
    (system.folder / "go").touch()

    for job_id in ("long", "behind"):
        job = system.reaches(job_id, "succeeded", deadline=60)
        assert (job.attempt, system.runs(job_id)) == (1, 1)
    eventually(lambda: system.job("long").deliveries >= 2)
    eventually(lambda: system.depth("celery") == 0)
    system.shop.add.apply_async((1, 2), task_id="next")
    assert system.reaches("next", "succeeded", deadline=60).attempt == 1
    assert worker.terminate(60) == 0
    assert system.depth("celery") == 0
    assert system.depth("outbox.quarantine") == 0


def test_the_first_runs_result_stands_when_the_broker_restarts_in_the_middle_of_a_task(
    own: System, own_rabbitmq: Rabbitmq
) -> None:
    system = own
    system.shop.wait_for.apply_async(("go", 300.0), task_id="slow")
    system.dispatcher()
    worker = system.worker("-c", "2", pool="prefork")
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    own_rabbitmq.halt()
    (system.folder / "go").touch()
    first = system.reaches("slow", "succeeded")
    own_rabbitmq.start_again()

    eventually(lambda: "duplicate" in system.events("slow"), deadline=60)
    after = system.job("slow")
    assert (after.attempt, after.finished_at, system.runs("slow")) == (1, first.finished_at, 1)
    system.shop.add.apply_async((1, 2), task_id="next")
    assert system.reaches("next", "succeeded", deadline=60).attempt == 1
    eventually(lambda: system.depth("celery") == 0)
    assert worker.alive


@on_rabbitmq
def test_the_first_runs_result_stands_when_a_worker_ends_without_its_broker(
    system: System, proxy_to: Callable[[str], Proxy]
) -> None:
    url = system.environment["SHOP_BROKER"]
    broker = proxy_to(url)
    system.shop.wait_for.apply_async(("go", 300.0), task_id="slow")
    system.dispatcher()
    ending = system.worker("-c", "1", pool="prefork", SHOP_BROKER=broker.url_for(url))
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    broker.cut()
    eventually(lambda: "onnection to broker lost" in ending.log())
    ending.send(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in ending.log())
    (system.folder / "go").touch()
    first = system.reaches("slow", "succeeded")
    # It could not acknowledge: the broker has the message again.
    eventually(lambda: system.depth("celery") == 1)
    # Celery 5.4 takes half a minute to end without its broker.
    ending.kill()
    system.worker()

    eventually(lambda: "duplicate" in system.events("slow"))
    after = system.job("slow")
    assert (after.attempt, after.deliveries, system.runs("slow")) == (1, 2, 1)
    assert (after.state, after.finished_at) == ("succeeded", first.finished_at)
    eventually(lambda: system.depth("celery") == 0)


@on_rabbitmq
def test_a_job_that_is_published_twice_runs_once(system: System) -> None:
    """Neither of its messages has been delivered before: the broker calls both new."""
    system.shop.export.apply_async((3,), task_id="twice")
    for deliveries in (1, 2):
        system.dispatcher("--once").wait()
        assert system.depth("celery") == deliveries
        _forget_the_publication(system, "twice")
    workers = [system.worker("-n", f"{name}@%h") for name in ("one", "two")]

    eventually(lambda: system.job("twice").deliveries == 2)
    job = system.reaches("twice", "succeeded")
    assert (job.attempt, system.runs("twice")) == (1, 1)
    eventually(lambda: system.depth("celery") == 0)
    assert all(worker.alive for worker in workers)


def _forget_the_publication(system: System, job_id: str) -> None:
    """Leave the row as a dispatcher leaves it that was killed before it could mark it."""
    message = system.outbox.tables.message
    with system.outbox.engine.begin() as connection:
        connection.execute(
            message.update()
            .where(message.c.job_id == job_id)
            .values(published_at=None, due_at=datetime.now(timezone.utc))
        )
