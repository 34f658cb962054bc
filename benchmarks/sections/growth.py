"""With many more rows."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.arithmetic import Spread
from benchmarks.child import Child
from benchmarks.contest import Contender, Say, compete
from benchmarks.results import OURS, UNIT, Bar, Section
from benchmarks.sections.plans import explained
from benchmarks.sections.running import forget_runs, rate_of_runs, running, worker
from benchmarks.stage import Place, Stage

#: Due rows of both, the batches and the jobs of a round, and final jobs.
COUNTS = {
    "quick": ((1500, 4000), 2, 50, (100, 4000)),
    "default": ((10_000, 1_000_000), 10, 1000, (10_000, 1_000_000)),
    "full": ((10_000, 1_000_000), 10, 2000, (10_000, 10_000_000)),
}


#: Rows from which on a table must never be read as a whole.
LARGE = 100_000


@dataclass(frozen=True)
class Sized:
    """A database of some size, with its dispatcher."""

    name: str
    unit: str
    due: int
    final: int
    place: Place
    child: Child


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    dues, batches, jobs, finals = COUNTS[size]
    found = Section("growth", "growth: the same with many more rows", "1/s")
    found.notes.append("a final job has one line in the journal here, where a real one has four")
    few_due = dues[0]
    names = [f"{due:,} due rows" for due in dues]
    ended = [f"{final:,} final jobs" for final in finals]
    with ExitStack() as stack:
        sized: list[Sized] = []
        for name, unit, due, final in (
            *((name, names[0], due, 0) for name, due in zip(names, dues, strict=True)),
            *((name, ended[0], few_due, final) for name, final in zip(ended, finals, strict=True)),
        ):
            place = stack.enter_context(stage.place())
            child = stack.enter_context(
                stage.child("benchmarks.peers.our_dispatcher:Dispatcher", place)
            )
            began = time.monotonic()
            child.call("fill", due, final, timeout=7200.0)
            seconds = round(time.monotonic() - began, 1)
            say(f"{name}: made in {seconds} s")
            found.facts[f"seconds to make {name}"] = seconds
            sized.append(Sized(name, unit, due, final, place, child))
        found.lines = compete(_dispatching(sized, batches), rounds, say)
        found.lines += compete(_claiming(stage, sized, jobs), rounds, say)
        for each in sized:
            _explain(stage, each, found)
    for each in sized[1::2]:
        for what in ("dispatch", "claim"):
            name, unit = f"{what}, {each.name}", f"{what}, {each.unit}"
            found.hold(f"{what} with {each.name} beside {each.unit}", name, unit, 0.9)
    return found


def _dispatching(sized: list[Sized], batches: int) -> list[Contender]:
    does = f"{batches} batches of 500: claim, publish, confirm, mark"
    return [
        Contender(
            f"dispatch, {each.name}",
            UNIT if each.name == each.unit else OURS,
            does,
            partial(_dispatch, each.child, batches),
            f"dispatch, {each.unit}",
        )
        for each in sized
    ]


def _dispatch(child: Child, batches: int) -> float:
    rate: float = child.call("batches", batches)
    child.call("purge")
    child.call("publish_again", timeout=600.0)
    return rate


def _claiming(stage: Stage, sized: list[Sized], jobs: int) -> list[Contender]:
    does = f"{jobs:,} jobs in a worker, -P solo: claim, run nothing, settle"
    return [
        Contender(
            f"claim, {each.name}",
            UNIT if each.name == each.unit else OURS,
            does,
            partial(_claim, stage, each, jobs),
            f"claim, {each.unit}",
        )
        for each in sized
    ]


def _claim(stage: Stage, sized: Sized, jobs: int) -> float:
    sized.child.call("purge")
    published = sized.child.call("publish", jobs)
    forget_runs(sized.place)
    with running(stage, sized.place, *worker("ours_app", "solo", 1), name="worker") as process:
        return rate_of_runs(sized.place, published, process, 300.0)


def _explain(stage: Stage, sized: Sized, found: Section) -> None:
    with explained(stage, sized.place) as plans:
        sized.child.call("reconnect")
        sized.child.call("purge")
        published = sized.child.call("publish", 20)
        forget_runs(sized.place)
        argv = worker("ours_app", "solo", 1)
        with running(stage, sized.place, *argv, name="explained") as process:
            rate_of_runs(sized.place, published, process, 60.0)
    if not plans.found:
        found.notes.append("no plans: the log of the server is not here")
        return
    found.facts[f"plans, {sized.name}"] = plans.found
    if max(sized.due, sized.final) < LARGE:
        # The planner reads a small table as a whole, and is right.
        return
    whole = plans.scans()
    what = f"whole tables read with {sized.name}"
    found.bars.append(Bar(what, Spread.of([len(whole)]), 0, at_most=True, measure=""))
    if whole:
        found.notes.append(f"{sized.name}: {whole[0]}")
