"""Delayed jobs wait in the database, however many: not in the broker, not in a process's memory."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from sqlalchemy import func, select

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.processes import ProcessGroup
from tests.wait import eventually

JOBS = 20_000

#: Bytes by which a process may grow meanwhile: 400 for each job, less than a message's headers.
GROWTH = 8_000_000


@on_rabbitmq
def test_twenty_thousand_jobs_with_a_countdown_are_neither_in_the_broker_nor_in_memory(
    system: System,
) -> None:
    dispatcher = system.dispatcher()
    worker = system.worker("-c", "2", pool="threads")
    _run(system, "before", 20)
    memory = _memory(dispatcher), _memory(worker)

    system.shop.add.apply_async((1, 2), task_id="later-0", countdown=3600)
    _copy(system, "later-0", JOBS - 1)

    # Whoever would take some of them has had the time for it.
    _run(system, "after", 20)
    assert system.depth("celery") == 0
    job, message = system.outbox.tables.job, system.outbox.tables.message
    with system.outbox.engine.connect() as connection:
        waiting = select(
            func.count(), func.sum(job.c.deliveries), func.min(job.c.available_at - func.now())
        ).where(job.c.state == "queued")
        count, deliveries, soonest = connection.execute(waiting).one()
        pending = select(func.count()).where(
            message.c.published_at.is_(None), message.c.claimed_by.is_(None)
        )
        assert connection.scalar(pending) == JOBS
    assert (count, deliveries) == (JOBS, 0)
    assert soonest > timedelta(seconds=3000)
    grown = _memory(dispatcher) - memory[0], _memory(worker) - memory[1]
    assert max(grown) < GROWTH, grown


def _run(system: System, name: str, count: int) -> None:
    for number in range(count):
        system.shop.add.apply_async((number, 1), task_id=f"{name}-{number}")
    for number in range(count):
        assert system.reaches(f"{name}-{number}", "succeeded").attempt == 1
    eventually(lambda: system.depth("celery") == 0)


def _copy(system: System, job_id: str, count: int) -> None:
    """Record more jobs like this one, in one transaction and without 20,000 calls."""
    job, message = system.outbox.tables.job, system.outbox.tables.message
    with system.outbox.engine.begin() as connection:
        for table, named, made in ((job, "id", ()), (message, "job_id", ("id",))):
            same = ", ".join(each.name for each in table.c if each.name not in (named, *made))
            connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({named}, {same})"
                f" SELECT {named} || '-' || number, {same}"
                f" FROM {table.name}, generate_series(1, {count}) AS number"
                f" WHERE {named} = '{job_id}'"
            )


def _memory(process: ProcessGroup) -> int:
    """The memory that a process has, in bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024
