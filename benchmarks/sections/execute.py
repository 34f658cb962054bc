"""Tasks that do nothing, from the queue to their end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks import peers
from benchmarks.child import Child
from benchmarks.contest import Contender, Say, compete
from benchmarks.results import OURS, PEER, UNIT, Section
from benchmarks.sections import callers as c
from benchmarks.sections.running import (
    forget_runs,
    rate_of_runs,
    running,
    worker,
)
from benchmarks.stage import Place, Stage
from tests.wait import eventually

#: Jobs of a round, all in the queue before the worker starts: of those who keep a record of each
#: job, and of Celery and pgqueuer, who would be done before they are warm.
COUNTS = {"quick": (100, 200), "default": (1000, 3000), "full": (10_000, 10_000)}

#: Pools, and how many tasks each runs at a time.
POOLS = (("solo", 1), ("prefork", 2), ("threads", 4))

#: Seconds in which the slowest worker is done.
LONGEST = 180.0

SOLO = "Celery, solo"


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    count, many = COUNTS[size]
    found = Section("execute", "execute: tasks that do nothing", "jobs/s")
    found.notes.append(
        "a rate counts the bodies that ran, by the bytes that they append to a file, from the "
        "first tenth to the last; everything was in the queue before the worker started"
    )
    with ExitStack() as stack:
        place = stack.enter_context(stage.place())
        plain = stack.enter_context(stage.child("benchmarks.peers.stock:Caller", place, True))
        our_place = stack.enter_context(stage.place())
        ours = stack.enter_context(
            stage.child("benchmarks.peers.our_dispatcher:Dispatcher", our_place)
        )
        contenders: list[Contender] = []
        for pool, concurrency in POOLS:
            unit = f"Celery, {pool}"
            how = f"-P {pool} -c {concurrency}, prefetch multiplier 4"
            contenders += [
                Contender(
                    unit,
                    UNIT,
                    f"stock Celery, {how}, late acks, results ignored",
                    partial(_plain, stage, place, plain, many, pool, concurrency),
                    unit,
                ),
                Contender(
                    f"celery-outbox, {pool}",
                    OURS,
                    f"{how}, results ignored",
                    partial(_ours, stage, our_place, ours, count, pool, concurrency),
                    unit,
                ),
            ]
        contenders += _peers(stage, stack, found, count, many)
        found.lines = compete(contenders, rounds, say)
    for pool in ("prefork", "threads"):
        found.hold(f"execute on {pool}", f"celery-outbox, {pool}", f"Celery, {pool}", 0.6)
    found.ahead("celery-outbox, prefork", ["procrastinate"])
    return found


def _peers(
    stage: Stage, stack: ExitStack, found: Section, count: int, many: int
) -> list[Contender]:
    programs = "benchmarks.programs"
    known = (
        ("procrastinate", "procrastinate", f"{programs}.procrastinate_worker", 4, count),
        ("pgqueuer", "pgqueuer", f"{programs}.pgqueuer_worker", 10, many),
        ("pgqueuer, tuned", "pgqueuer", f"{programs}.pgqueuer_worker", 200, many),
    )
    made = []
    for name, peer, program, option, jobs in known:
        if not peers.is_installed(peer):
            note = f"{peer} is not installed"
            found.notes += [note] if note not in found.notes else []
            continue
        place = stack.enter_context(stage.place())
        caller = stack.enter_context(stage.child(c.PEERS[peer], place))
        what = "concurrency" if peer == "procrastinate" else "batch_size"
        does = f"its worker, one process, {what} {option}, coroutines; Celery solo is 1.00"
        run = partial(_peer, stage, place, caller, jobs, [program, str(option)])
        made.append(Contender(name, PEER, does, run, SOLO))
    return made


def _plain(
    stage: Stage, place: Place, caller: Child, count: int, pool: str, concurrency: int
) -> float:
    caller.call("clean")
    caller.call("calls", count)
    return _measure(stage, place, count, worker("plain_app", pool, concurrency))


def _ours(
    stage: Stage, place: Place, dispatcher: Child, count: int, pool: str, concurrency: int
) -> float:
    dispatcher.call("purge")
    dispatcher.call("fill", count)
    dispatcher.call("drain")
    return _measure(
        stage,
        place,
        count,
        worker("ours_app", pool, concurrency),
        ended=lambda: dispatcher.call("succeeded") == count,
    )


def _peer(stage: Stage, place: Place, caller: Child, count: int, program: list[str]) -> float:
    caller.call("clean")
    caller.call("calls_in_one_transaction", count)
    return _measure(stage, place, count, ["-m", *program])


def _measure(
    stage: Stage,
    place: Place,
    count: int,
    argv: list[str],
    ended: Callable[[], bool] | None = None,
) -> float:
    forget_runs(place)
    with running(stage, place, *argv, name="worker") as process:
        rate = rate_of_runs(place, count, process, LONGEST)
        if ended is not None:
            # A body that ran is not yet a job that has ended.
            eventually(ended, deadline=30, message="the jobs have not ended")
    return rate
