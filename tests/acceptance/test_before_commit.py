"""The dispatcher and the worker that wait for work see none of a transaction that is open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from celery_outbox import UnknownJob
from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.system import System
from tests.wait import eventually

#: On SQLite an open transaction that has written keeps all other writers waiting.
on_postgresql = pytest.mark.parametrize(
    "system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True
)


@pytest.fixture(autouse=True)
def at_work(system: System) -> None:
    """A dispatcher and a worker that run whatever there is to run."""
    system.shop.payments.metadata.create_all(system.outbox.engine)
    system.dispatcher()
    system.worker("-c", "2", pool="threads")
    run_others(system, "before")


@on_postgresql
@pytest.mark.parametrize("end", [Session.commit, Session.rollback])
def test_a_job_runs_after_the_commit_alone_and_finds_the_callers_row(
    system: System, end: Callable[[Session], None]
) -> None:
    with Session(system.outbox.engine) as session:
        order = system.shop.payments.insert().values(job="order-42")
        [number] = session.execute(order).inserted_primary_key
        with system.outbox.use(session):
            job_id = system.shop.find_payment.delay(number).id
        # Its rows are in the database, where nobody else sees them.
        system.outbox.write(session)
        seen = rows(system)
        run_others(system, "meanwhile")
        assert [after - before for before, after in zip(seen, rows(system), strict=True)] == [3, 3]
        assert system.depth("celery") == 0
        with pytest.raises(UnknownJob):
            system.job(job_id)
        assert system.runs(job_id) == 0
        end(session)

    if end is Session.commit:
        job = system.reaches(job_id, "succeeded")
        assert (job.attempt, job.deliveries, system.runs(job_id)) == (1, 1, 1)
        assert result(system, job_id) == "order-42"
    run_others(system, "after")
    assert system.runs(job_id) == (end is Session.commit)
    made = 10 if end is Session.commit else 9
    assert rows(system) == (made, made)
    eventually(lambda: system.depth("celery") == 0)


def run_others(system: System, when: str) -> None:
    """Run jobs of others, three of them: whoever would take this one has had the time for it."""
    names = [f"{when}-{number}" for number in range(3)]
    for name in names:
        system.shop.add.apply_async((1, 2), task_id=name)
    for name in names:
        system.reaches(name, "succeeded")
        eventually(lambda name=name: system.job(name).published_at is not None)


def rows(system: System) -> tuple[int, int]:
    """How many jobs and messages another connection sees."""
    tables = system.outbox.tables
    with system.outbox.engine.connect() as connection:
        counts = [
            connection.scalar(select(func.count()).select_from(table))
            for table in (tables.job, tables.message)
        ]
    return counts[0], counts[1]


def result(system: System, job_id: str) -> object:
    """What a job returned."""
    job = system.outbox.database.read(
        lambda connection: jobs.get(connection, system.outbox.tables, job_id)
    )
    return decode_result(job.result, job.result_type)
