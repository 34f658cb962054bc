"""The last two members of a chord end at the same moment, in two workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import chord
from sqlalchemy import select, text

from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually

ROUNDS = 6

#: Who waits for a lock that another transaction holds.
WAITING = """
SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE NOT granted AND datname = current_database()
"""


@on_rabbitmq
def test_of_two_last_members_in_two_workers_one_goes_on_with_the_chord(system: System) -> None:
    system.dispatcher()
    for name in ("first", "second"):
        # Each takes one message and no more.
        system.worker("-c", "1", "--prefetch-multiplier", "1", "-n", f"{name}@%h")

    for number in range(ROUNDS):
        end_together(system, number, fails=number % 2 == 1)

    eventually(lambda: system.depth("celery") == 0)
    for number in range(ROUNDS):
        fails = number % 2 == 1
        assert system.runs(f"body-{number}") == (0 if fails else 1)
        assert notes(system, f"body-{number}") == (1 if fails else 0)
        assert [system.runs(f"{number}-{place}") for place in range(2)] == [1, 1]


def end_together(system: System, number: int, fails: bool) -> None:
    """Run a chord whose members, of which one may fail, are counted at the same moment."""
    go, members = f"go-{number}", [f"{number}-{place}" for place in range(2)]
    shop, tasks = system.shop, system.shop.app.tasks
    another = shop.refuse_after if fails else shop.wait_for
    header = [
        task.s(go).set(task_id=job_id)
        for task, job_id in zip((shop.wait_for, another), members, strict=True)
    ]
    body = tasks["canvas.listed"].s().set(task_id=f"body-{number}")
    chord_id = chord(header)(body.on_error(tasks["canvas.note"].s())).parent.id
    for job_id in members:
        system.reaches(job_id, "running")
    assert len({system.job(job_id).lease.by for job_id in members}) == 2

    with chord_locked(system, chord_id):
        (system.folder / go).touch()
        system.reaches(members[0], "succeeded")
        system.reaches(members[1], "quarantined" if fails else "succeeded")
        eventually(lambda: waiting(system) == 2)
        assert state_of(system, chord_id) == ("open", 0)

    if fails:
        eventually(lambda: state_of(system, chord_id) == ("failed", 2))
        eventually(lambda: notes(system, f"body-{number}") == 1)
    else:
        assert system.reaches(f"body-{number}", "succeeded").attempt == 1
        assert returned(system, f"body-{number}") == [go, go]
        assert state_of(system, chord_id) == ("done", 2)


@contextmanager
def chord_locked(system: System, chord_id: str) -> Iterator[None]:
    """Hold the row of a chord: who counts a member waits for the end of this."""
    table = system.outbox.tables.chord
    with system.outbox.engine.begin() as connection:
        locked = select(table.c.id).where(table.c.id == chord_id).with_for_update()
        assert connection.scalar(locked) == chord_id
        yield


def waiting(system: System) -> int:
    """How many transactions wait for a lock."""
    with system.outbox.engine.connect() as connection:
        return int(connection.scalar(text(WAITING)) or 0)


def state_of(system: System, chord_id: str) -> tuple[str, int]:
    """The state of a chord, and how many members were counted."""
    table = system.outbox.tables.chord
    with system.outbox.engine.connect() as connection:
        row = connection.execute(table.select().where(table.c.id == chord_id)).one()
    return row.state, row.counted


def notes(system: System, job_id: str) -> int:
    """How often the error callback of a job ran."""
    lines = (system.folder / "runs").read_text().splitlines()
    return len([line for line in lines if line.endswith(f" note {job_id}")])


def returned(system: System, job_id: str) -> Any:
    """What a job that has succeeded returned."""
    job = system.outbox.database.read(lambda c: jobs.get(c, system.outbox.tables, job_id))
    return decode_result(job.result, job.result_type)
