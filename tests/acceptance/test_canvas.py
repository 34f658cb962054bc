"""Chains, groups, chords and replacements, with real workers and dispatchers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError

from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.system import System
from tests.processes import Processes
from tests.wait import eventually

WAYS = ("rabbitmq-redis", "redis-redis", "rabbitmq-none")


@pytest.fixture(params=WAYS)
def system(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path, postgresql_url: str
) -> Iterator[System]:
    """A system with this broker and this result backend."""
    broker, backend = request.param.split("-")
    folder = tmp_path / "shop"
    folder.mkdir()
    settings = {}
    if backend == "redis":
        settings["result_backend"] = request.getfixturevalue("redis_url")
    broker_url = request.getfixturevalue(f"{broker}_url")
    options = {"visibility_timeout": 3} if broker == "redis" else {}
    made = System(
        f"canvas-{broker}", processes, folder, postgresql_url, broker_url, options, settings
    )
    yield made
    made.close()


def result_of(system: System, job_id: str) -> Any:
    """Return what a job that has succeeded returned, out of its row."""
    system.reaches(job_id, "succeeded", deadline=90)
    job = system.outbox.database.read(lambda c: jobs.get(c, system.outbox.tables, job_id))
    assert job is not None
    return decode_result(job.result, job.result_type)


def bodies(system: System) -> list[str]:
    """Return the ids of the jobs whose body ran as the body of a chord, one for each run."""
    lines = (system.folder / "runs").read_text().splitlines()
    return [line.partition(" ")[0] for line in lines if line.endswith(" body")]


def test_every_canvas_gives_what_celery_gives(system: System):
    tasks = system.shop.app.tasks
    add, total, listed = (tasks[f"canvas.{name}"] for name in ("add", "total", "listed"))
    become, grow = tasks["canvas.become"], tasks["canvas.grow"]
    system.dispatcher()
    system.worker("-c", "2", pool="threads")
    cases: list[tuple[Any, Any]] = [
        (chord([add.s(1, 1), add.s(2, 2)], total.s()), 6),
        (chord([add.s(1, 1)], total.s()), 2),
        (chord([], total.s()), 0),
        (chord([chain(add.s(1, 1), add.s(1)), add.s(2, 2)], listed.s()), [3, 4]),
        (
            chord([chain(add.s(1, 1), group(add.s(1), add.s(2))), add.s(2, 2)], listed.s()),
            [[3, 4], 4],
        ),
        (chord([chord([add.s(1, 1), add.s(2)], total.s()), add.s(2, 2)], listed.s()), [4, 4]),
        (chain(group(add.s(1, 1), add.s(2, 2)), total.s(), add.s(1)), 7),
        (chain(add.s(1, 1), add.si(7), add.s(3)), 10),
        (become.s("chain", 1), 7),
        (become.s("group", 1), [2, 3]),
        (become.s("chord", 1), 5),
        (become.s("chain of chord", 1), 7),
        (become.s("twice", 1), 7),
        (chord([become.s(what, 1) for what in ("chain", "chord")], listed.s()), [7, 5]),
        (add.starmap([(1, 2), (3, 4)]), [3, 7]),
        (chord([grow.s(1), add.s(5)], total.s()), 107),
    ]
    if celery.VERSION >= (5, 5):
        # Celery 5.4 by itself never ends the first one, and gives the second one in any order.
        cases.append((become.s("chain of group", 1), [3, 4]))
        cases.append((chord([become.s("chain", 1), become.s("group", 1)], listed.s()), [7, [2, 3]]))
    results = [canvas.apply_async() for canvas, _ in cases]
    members = group(add.s(number) for number in range(5)).apply_async()
    for (canvas, expected), result in zip(cases, results, strict=True):
        assert result_of(system, result.id) == expected, canvas
    for number, member in enumerate(members.results):
        assert result_of(system, member.id) == number
    if system.shop.app.conf.result_backend:
        assert [result.get(timeout=60) for result in results] == [value for _, value in cases]
        assert members.get(timeout=60) == [0, 1, 2, 3, 4]
        assert results[0].parent.get(timeout=60) == [2, 4]
    assert len(bodies(system)) == len(set(bodies(system)))
    # Nothing waits for what will never come.
    chords = system.outbox.tables.chord
    with system.outbox.engine.connect() as connection:
        states = {row.state for row in connection.execute(chords.select()) if row.counted}
    assert states == {"done"}


def test_workers_that_die_around_the_count_lose_no_body_and_run_none_twice(system: System):
    tasks = system.shop.app.tasks
    add, total = tasks["canvas.add"], tasks["canvas.total"]
    header = [add.s(number, 0).set(task_id=f"part-{number}") for number in range(3)]
    chord(header)(total.s().set(task_id="body"))
    system.dispatcher()
    for number in range(3):
        # The result is stored, and the member not counted.
        killed = system.worker(fault="execute.after_settle", OUTBOX_FAULT_JOB=f"part-{number}")
        assert killed.wait(90) == -signal.SIGKILL
        system.redeliver()
    killed = system.worker(fault="execute.after_settle", OUTBOX_FAULT_JOB="body")
    assert killed.wait(90) == -signal.SIGKILL
    system.redeliver()
    system.worker()
    assert result_of(system, "body") == 3
    eventually(lambda: system.job("body").deliveries >= 2, deadline=60)
    assert bodies(system) == ["body"]
    assert [system.runs(f"part-{number}") for number in range(3)] == [1, 1, 1]


def test_a_header_in_quarantine_and_one_that_no_broker_takes_end_their_chords(system: System):
    tasks = system.shop.app.tasks
    add, refuse, total = (tasks[f"canvas.{name}"] for name in ("add", "refuse", "total"))
    note = tasks["canvas.note"]
    refused = chord([add.s(1, 1), refuse.s()])(total.s().on_error(note.s()))
    cancelled = chord([add.s(1, 1), add.s(2).set(task_id="cancelled", countdown=600)])(total.s())
    system.dispatcher()
    system.worker()
    system.outbox.control.cancel("cancelled")

    def states() -> list[str]:
        chords = system.outbox.tables.chord
        with system.outbox.engine.connect() as connection:
            return [row.state for row in connection.execute(chords.select())]

    eventually(lambda: states() == ["failed", "failed"], deadline=90, message=lambda: str(states()))
    runs = system.folder / "runs"
    eventually(lambda: f"note {refused.id}" in runs.read_text(), deadline=60)
    assert bodies(system) == []
    if system.shop.app.conf.result_backend:
        for result in (refused, cancelled):
            error = result.get(timeout=60, propagate=False)
            assert isinstance(error, ChordError)
            assert str(error).startswith("Dependency ")
