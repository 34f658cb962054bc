"""Workers that run, and the traces that their bodies leave."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.stage import Place, Stage
from tests.processes import ProcessGroup
from tests.wait import eventually

#: The share of all runs before the clock starts: until then processes are still coming up.
WARM_UP = 0.1

#: Seconds in which some body must have run, or the worker is taken for dead.
PATIENCE = 90.0


@contextmanager
def running(stage: Stage, place: Place, *argv: str, name: str) -> Iterator[ProcessGroup]:
    """A Python program that works in this place; killed, with its children, after the block."""
    process = stage.processes.python(*argv, env=place.environment, name=name)
    try:
        yield process
    finally:
        process.kill()


def celery(app: str, *arguments: str) -> list[str]:
    """The arguments of ``python`` that run a command of Celery for one of our apps."""
    return ["-m", "celery", "-A", f"benchmarks.programs.{app}", *arguments]


def worker(app: str, pool: str, concurrency: int) -> list[str]:
    """The same for a worker that talks to no other worker."""
    options = ["--without-gossip", "--without-mingle", "-l", "WARNING"]
    return celery(app, "worker", "-P", pool, "-c", str(concurrency), *options)


def runs(place: Place) -> int:
    """How many bodies have run."""
    with suppress(FileNotFoundError):
        return os.stat(place.runs).st_size
    return 0


def forget_runs(place: Place) -> None:
    """Begin with none."""
    with suppress(FileNotFoundError):
        os.remove(place.runs)


def rate_of_runs(place: Place, total: int, process: ProcessGroup, seconds: float) -> float:
    """How many bodies ran in a second, between the first tenth and the last one.

    Arguments:
        total: bodies that will run.
        process: the worker.
        seconds: the longest time for it.

    Raises:
        AssertionError: not all ran, or some ran twice.
    """

    def reached(count: int) -> bool:
        assert process.alive, "the worker ended"
        return runs(place) >= count

    def log() -> str:
        return f"{runs(place)} of {total} bodies ran; the worker's log:\n{process.tail(20)}\n"

    first = max(int(total * WARM_UP), 1)
    eventually(lambda: reached(first), deadline=PATIENCE, interval=0.002, message=log)
    began, before = time.perf_counter(), runs(place)
    eventually(lambda: reached(total), deadline=seconds, interval=0.002, message=log)
    ended, after = time.perf_counter(), runs(place)
    assert after == total, f"{after} bodies ran, and not {total}"
    return (after - before) / (ended - began)
