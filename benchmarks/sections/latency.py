"""From the commit to the first line of the body, while nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.arithmetic import Spread, differences, percentile, rotated
from benchmarks.child import Child
from benchmarks.contest import Say
from benchmarks.results import OURS, PEER, UNIT, Bar, Line, Section
from benchmarks.sections import callers as c
from benchmarks.sections.running import celery, running, worker
from benchmarks.stage import Place, Stage
from tests.wait import eventually

#: Jobs of a round, for each contender.
COUNTS = {"quick": 10, "default": 100, "full": 400}

#: Jobs in a second.
RATE = 20.0

#: Jobs before the first round, until everything is imported, connected and planned.
WARM_UP = 10

PLAIN = "Celery"
CELERY_OUTBOX = "celery-outbox"
DJANGO = "django-celery-outbox"


@dataclass
class Runner:
    """A contender whose processes run and wait.

    Attributes:
        caller: records jobs.
        place: where its bodies leave their times.
        delays: in milliseconds, of each round.
    """

    line: Line
    caller: Child
    place: Place
    delays: list[list[float]]

    def measure(self, first: int, count: int) -> list[float]:
        """Record so many jobs, and return for each how long after the begin of its commit its body
        began, in milliseconds."""
        stamps = self.caller.call("stamped", first, count, RATE)
        began = {number: before for number, before, _ in stamps}

        def started() -> dict[int, int]:
            found: dict[int, int] = {}
            with suppress(FileNotFoundError):
                for line in Path(self.place.runs).read_text().splitlines():
                    number, _, at = line.partition(" ")
                    # The first run counts, and the last line may be half written.
                    if number.isdigit() and len(at) >= len(str(min(began.values()))):
                        found.setdefault(int(number), int(at))
            return found

        eventually(
            lambda: began.keys() <= started().keys(),
            deadline=60,
            message=lambda: f"{len(began.keys() & started().keys())} of {count} bodies began",
        )
        found = started()
        return [(found[number] - before) / 1e6 for number, before in began.items()]


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    count = COUNTS[size]
    found = Section("latency", "latency: commit to the first line of the body", "1/s")
    found.notes.append(
        f"{count} jobs a round at about {RATE:.0f}/s, all daemons idle; from the begin of the "
        "commit (of .delay(), where there is none) to the body, by one monotonic clock; the "
        "ratio is that of the inverse medians"
    )
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for entry in _entries(found):
            place = stack.enter_context(stage.place())
            line = Line(entry.name, entry.role, entry.does, unit=PLAIN)
            caller = stack.enter_context(stage.child(entry.kind, place, *entry.arguments))
            for program in entry.programs:
                stack.enter_context(running(stage, place, *program, name="latency"))
            runners[entry.name] = Runner(line, caller, place, [])
        numbers = 1
        for runner in runners.values():
            # The first ones wait for processes that are still coming up.
            runner.measure(numbers, WARM_UP)
            numbers += WARM_UP
        for number in range(rounds):
            for name in rotated(list(runners), number):
                runner = runners[name]
                delays = runner.measure(numbers, count)
                numbers += count
                runner.delays.append(delays)
                middle = percentile(delays, 0.5)
                runner.line.rates.append(1000 / middle)
                worst = percentile(delays, 0.99)
                say(f"round {number + 1}/{rounds}  {name}: p50 {middle:.1f} ms, p99 {worst:.1f} ms")
    _conclude(found, runners)
    return found


def _conclude(found: Section, runners: dict[str, Runner]) -> None:
    found.lines = [runner.line for runner in runners.values()]
    figures = {}
    for name, runner in runners.items():
        everything = [delay for delays in runner.delays for delay in delays]
        figures[name] = {
            "p50_ms": round(percentile(everything, 0.5), 2),
            "p99_ms": round(percentile(everything, 0.99), 2),
            "rounds_ms": [[round(delay, 3) for delay in delays] for delays in runner.delays],
        }
        runner.line.does += f"; p50 {figures[name]['p50_ms']} ms, p99 {figures[name]['p99_ms']} ms"
    found.facts["delays"] = figures
    for share, limit in ((0.5, 5.0), (0.99, 25.0)):
        ours, plain = (
            [percentile(delays, share) for delays in runners[name].delays]
            for name in (CELERY_OUTBOX, PLAIN)
        )
        what = f"latency, p{share * 100:.0f} more than Celery's"
        more = Spread.of(differences(ours, plain))
        found.bars.append(Bar(what, more, limit, at_most=True, measure="ms"))
    found.ahead(CELERY_OUTBOX, [name for name in runners if runners[name].line.role == PEER])


@dataclass(frozen=True)
class Entry:
    """A contender that is still to be started.

    Attributes:
        kind: the class of its web process, and ``arguments`` of it.
        programs: its daemons, as arguments of ``python``.
    """

    name: str
    role: str
    does: str
    kind: str
    programs: tuple[list[str], ...]
    arguments: tuple[object, ...] = ()


def _entries(found: Section) -> Iterator[Entry]:
    plain = worker("plain_app", "prefork", 2)
    yield Entry(
        PLAIN,
        UNIT,
        ".delay(), worker -P prefork -c 2",
        "benchmarks.peers.stock:Caller",
        (plain,),
        (False,),
    )
    yield Entry(
        CELERY_OUTBOX,
        OURS,
        "a dispatcher, worker -P prefork -c 2",
        "benchmarks.peers.ours:Caller",
        (celery("ours_app", "outbox", "dispatch"), worker("ours_app", "prefork", 2)),
    )
    for name in c.PEERS:
        if not peers.is_installed(name):
            found.notes.append(f"{name} is not installed")
    programs = "benchmarks.programs"
    if peers.is_installed(DJANGO):
        for title, options in ((DJANGO, ()), (f"{DJANGO}, tuned", ("--idle-time", "0.02"))):
            relay = ["-m", f"{programs}.django_relay", *options]
            does = f"its relay {' '.join(options) or 'with its defaults'}, worker -P prefork -c 2"
            yield Entry(title, PEER, does, c.PEERS[DJANGO], (relay, plain))
    if peers.is_installed("procrastinate"):
        does = "its worker, concurrency 2, a coroutine"
        argv = ["-m", f"{programs}.procrastinate_worker", "2"]
        yield Entry("procrastinate", PEER, does, c.PEERS["procrastinate"], (argv,))
    if peers.is_installed("pgqueuer"):
        does = "its worker, a coroutine"
        argv = ["-m", f"{programs}.pgqueuer_worker", "10"]
        yield Entry("pgqueuer", PEER, does, c.PEERS["pgqueuer"], (argv,))
