"""What a dispatcher and a worker need of the machine's memory."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from benchmarks.arithmetic import Spread
from benchmarks.child import Child
from benchmarks.contest import Say
from benchmarks.peers.imports import resident
from benchmarks.results import Bar, Section
from benchmarks.sections.running import celery, forget_runs, rate_of_runs, running, worker
from benchmarks.stage import Place, Stage
from tests.wait import eventually

#: Messages in all, and of one portion; jobs of a worker.
COUNTS = {
    "quick": (1500, 500, 50),
    "default": (200_000, 20_000, 2000),
    "full": (1_000_000, 20_000, 10_000),
}

#: What a process may grow after its first portions, in MB: Python's allocator is not exact.
FLAT = 2.0

POOL = ("prefork", 2)


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it; once, whatever the rounds."""
    total, portion, jobs = COUNTS[size]
    found = Section("memory", f"memory: a dispatcher over {total:,} messages, and workers", "")
    found.notes.append("resident set sizes (VmRSS), measured once")
    _dispatcher(stage, found, total, portion, say)
    _workers(stage, found, jobs, say)
    return found


def _dispatcher(stage: Stage, found: Section, total: int, portion: int, say: Say) -> None:
    sizes: list[float] = []
    with ExitStack() as stack:
        place = stack.enter_context(stage.place())
        child = stack.enter_context(
            stage.child("benchmarks.peers.our_dispatcher:Dispatcher", place)
        )
        argv = celery("ours_app", "outbox", "dispatch")
        process = stack.enter_context(running(stage, place, *argv, name="dispatcher"))
        for done in range(portion, total + 1, portion):
            child.call("fill", portion)
            eventually(
                lambda: child.call("unpublished") == 0,
                deadline=240,
                interval=0.2,
                message=lambda: f"the dispatcher is stuck:\n{process.tail(20)}\n",
            )
            child.call("purge")
            sizes.append(resident(process.pid))
            say(f"dispatcher: {done:,} messages, {sizes[-1]:.1f} MB")
    found.facts["dispatcher_mb"] = sizes
    found.facts["imports_mb"] = imports(stage)
    found.notes.append(
        "of which imports alone: "
        + ", ".join(f"{what} {size:.0f} MB" for what, size in found.facts["imports_mb"].items())
    )
    # What is imported late, and the largest batch, have been there by then.
    settled = sizes[len(sizes) // 5]
    for what, value, limit in (
        ("dispatcher, at most", max(sizes), 60.0),
        ("dispatcher, growth from a fifth of the messages on", sizes[-1] - settled, FLAT),
    ):
        found.bars.append(Bar(what, Spread.of([value]), limit, at_most=True, measure="MB"))


def imports(stage: Stage) -> dict[str, float]:
    """What a process holds when it has imported one thing after the other, in MB."""
    with stage.child("benchmarks.peers.imports:Imports") as child:
        found: dict[str, float] = child.call("sizes")
        return found


def _workers(stage: Stage, found: Section, jobs: int, say: Say) -> None:
    sizes: dict[str, list[float]] = {}
    with ExitStack() as stack:
        place = stack.enter_context(stage.place())
        plain = stack.enter_context(stage.child("benchmarks.peers.stock:Caller", place, False))
        for name, app in (("Celery", "plain_app"), ("Celery with SQLAlchemy", "database_app")):
            plain.call("clean")
            plain.call("calls", jobs)
            sizes[name] = _worker(stage, place, app, jobs)
            say(f"worker: {name}, {_shown(sizes[name])}")
        place = stack.enter_context(stage.place())
        ours = stack.enter_context(stage.child("benchmarks.peers.our_dispatcher:Dispatcher", place))
        sizes["celery-outbox"] = _worker_of(ours, stage, place, jobs)
        say(f"worker: celery-outbox, {_shown(sizes['celery-outbox'])}")
    found.facts["worker_mb"] = sizes
    found.notes.append("facts have the main process of each worker first, then its children")
    for base in ("Celery with SQLAlchemy", "Celery"):
        more = [
            ours - plain for ours, plain in zip(sizes["celery-outbox"], sizes[base], strict=True)
        ]
        what = f"a worker's process, more than {base}'s"
        found.bars.append(Bar(what, Spread.of(more), 15.0, at_most=True, measure="MB"))


def _worker_of(ours: Child, stage: Stage, place: Place, jobs: int) -> list[float]:
    ours.call("fill", jobs)
    ours.call("drain")
    return _worker(stage, place, "ours_app", jobs)


def _worker(stage: Stage, place: Place, app: str, jobs: int) -> list[float]:
    """The sizes of the main process and of each child, when so many jobs have run."""
    forget_runs(place)
    with running(stage, place, *worker(app, *POOL), name="worker") as process:
        rate_of_runs(place, jobs, process, 300.0)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return [resident(process.pid), *sorted(resident(int(pid)) for pid in children)]


def _shown(sizes: list[float]) -> str:
    return ", ".join(f"{size:.1f} MB" for size in sizes)
