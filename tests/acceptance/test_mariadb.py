"""The life of jobs on MariaDB, with either broker: run, retried, refused, lost, and through a
restart of the database."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.system import System
from tests.processes import Processes
from tests.servers.mariadb import Mariadb
from tests.wait import eventually
from tests.watchdog import Watchdog

pytestmark = pytest.mark.once

JOBS = 60


@pytest.fixture(scope="module")
def own_mariadb(watchdog: Watchdog) -> Iterator[Mariadb]:
    """A server that these tests may stop."""
    server = Mariadb.start(watchdog, private=True)
    yield server
    server.stop()


@pytest.fixture(params=["rabbitmq", "redis"])
def system(
    request: pytest.FixtureRequest, own_mariadb: Mariadb, processes: Processes, tmp_path: Path
) -> Iterator[System]:
    """MariaDB, by the URL that says MySQL, with each broker."""
    folder = tmp_path / "shop"
    folder.mkdir()
    url = own_mariadb.create_database(f"outbox_{request.param}").replace("mariadb+", "mysql+")
    options = {"visibility_timeout": 30} if request.param == "redis" else None
    broker = request.getfixturevalue(f"{request.param}_url")
    system = System(f"mariadb-{request.param}", processes, folder, url, broker, options)
    yield system
    system.close()


def test_jobs_live_through_all_that_may_happen(system: System, own_mariadb: Mariadb) -> None:
    dispatchers = [system.dispatcher(), system.dispatcher()]
    worker = system.worker("-c", "2", "--prefetch-multiplier", "1", pool="prefork")

    # Recorded in one transaction, and raced for by two dispatchers.
    ids = [f"add-{number}" for number in range(JOBS)]
    with system.outbox.engine.begin() as connection, system.outbox.use(connection):
        for number, job_id in enumerate(ids):
            system.shop.add.apply_async((number, 1), task_id=job_id)
    with system.outbox.engine.connect() as connection, system.outbox.use(connection):
        system.shop.add.apply_async((1, 2), task_id="never")
        connection.rollback()
    for number, job_id in enumerate(ids):
        assert system.reaches(job_id, "succeeded", deadline=90).attempt == 1
        assert system.runs(job_id) == 1
        assert _result(system, job_id) == number + 1
    assert _copies(system, ids) == JOBS

    # Retried from the database, and refused.
    system.shop.insist.apply_async(task_id="insists")
    system.shop.fail.apply_async(("",), task_id="fails")
    system.shop.refuse.apply_async(("x",), task_id="refused")
    assert system.reaches("insists", "succeeded").attempt == 6
    assert system.reaches("fails", "quarantined").reason == "attempts_exhausted"
    assert system.runs("fails") == 3
    assert system.reaches("refused", "quarantined").reason == "permanent"
    eventually(lambda: system.depth("outbox.quarantine") == 2)

    # A body whose writes are committed with its success.
    system.shop.payments.create(system.outbox.engine)
    system.shop.pay.apply_async(task_id="paid")
    system.reaches("letter-paid", "succeeded")
    with system.outbox.engine.connect() as connection:
        assert connection.scalars(select(system.shop.payments.c.job)).all() == ["paid"]

    # The child that runs it is killed.
    system.shop.wait_for.apply_async(("go", 90.0), task_id="killed")
    eventually(lambda: system.runs("killed") == 1)
    for child in _pool_processes(worker.pid):
        os.kill(child, signal.SIGKILL)
    eventually(lambda: system.runs("killed") == 2, deadline=60)
    (system.folder / "go").touch()
    assert system.reaches("killed", "succeeded").attempt == 2

    # The database goes away under a body, and comes back.
    system.shop.wait_for.apply_async(("back", 90.0), task_id="slow")
    eventually(lambda: system.runs("slow") == 1)
    own_mariadb.stop()
    (system.folder / "back").touch()
    eventually(lambda: worker.log().count("during=succeeded") >= 3)
    eventually(
        lambda: all("outbox.dispatch_paused" in dispatcher.log() for dispatcher in dispatchers)
    )
    own_mariadb.start_again()
    assert system.reaches("slow", "succeeded", deadline=60).attempt == 1
    assert (_result(system, "slow"), system.runs("slow")) == ("back", 1)

    system.shop.add.apply_async((1, 2), task_id="last")
    assert system.reaches("last", "succeeded", deadline=60).attempt == 1
    eventually(lambda: system.depth("celery") == 0)
    assert "never" not in {job.id for job in system.outbox.control.find(limit=1000)}
    for process in (*dispatchers, worker):
        assert process.alive
        # The dispatcher has not tried to listen, and says nothing of it.
        assert "outbox.listen" not in process.log()
    assert [process.terminate(60) for process in (*dispatchers, worker)] == [0, 0, 0]


def _pool_processes(parent: int) -> list[int]:
    """The worker's children."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    assert children
    return [int(child) for child in children]


def _result(system: System, job_id: str) -> object:
    with system.outbox.engine.connect() as connection:
        job = jobs.get(connection, system.outbox.tables, job_id)
    assert job is not None
    return decode_result(job.result, job.result_type)


def _copies(system: System, ids: list[str]) -> int:
    """How many messages were published for these jobs."""
    return sum(system.events(job_id).count("published") for job_id in ids)
