"""From the database to the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks import peers
from benchmarks.arithmetic import Spread
from benchmarks.child import Child
from benchmarks.contest import Contender, Say, compete
from benchmarks.results import FLOOR, OURS, PEER, UNIT, Section
from benchmarks.stage import Stage

#: The backlog of ours and of the floor, and that of a peer and of ``.delay()``, who publish one
#: message at a time, so that a smaller one is as good.
COUNTS = {"quick": (600, 100), "default": (20_000, 3000), "full": (20_000, 20_000)}

RAW = "raw py-amqp"
RAW_TABLE = "raw py-amqp, select and delete"
CELERY_OUTBOX = "celery-outbox"
DJANGO = "django-celery-outbox"
DJANGO_TUNED = "django-celery-outbox, tuned"
DELAY = "confirmed .delay()"

_TUNED = {"batch_size": 500, "publish_concurrency": 8}


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure RabbitMQ."""
    count, small = COUNTS[size]
    found = Section("dispatch", f"dispatch: {count:,} rows to RabbitMQ, confirmed", "messages/s")
    found.notes.append(f"{DJANGO} and .delay() publish {small:,}")
    with ExitStack() as stack:
        contenders = stack.enter_context(open_pipelines(stage, count))
        place = stack.enter_context(stage.place())
        delay = stack.enter_context(stage.child("benchmarks.peers.stock:Caller", place, True))
        does = ".delay() in a loop, each with its confirm; no database"
        contenders.append(Contender(DELAY, FLOOR, does, partial(_delays, delay, small), RAW))
        if peers.is_installed(DJANGO):
            for name, options in ((DJANGO, {}), (DJANGO_TUNED, _TUNED)):
                place = stack.enter_context(stage.place())
                kind = "benchmarks.peers.django_outbox:Relay"
                relay = stack.enter_context(stage.child(kind, place, options))
                does = f"its relay, {options or 'with its defaults'}; broker confirms on"
                contenders.append(Contender(name, PEER, does, partial(_drain, relay, small), RAW))
        else:
            found.notes.append(f"{DJANGO} is not installed")
        found.lines = compete(contenders, rounds, say)
    found.hold("dispatch to RabbitMQ", CELERY_OUTBOX, RAW, 0.8)
    found.ahead(CELERY_OUTBOX, [DJANGO, DJANGO_TUNED])
    return found


@contextmanager
def open_pipelines(stage: Stage, count: int) -> Iterator[list[Contender]]:
    """The raw publisher, with and without a table, and our dispatcher, with the same messages."""
    with ExitStack() as stack:

        def child(kind: str, place: object) -> Child:
            return stack.enter_context(stage.child(kind, place))

        place = stack.enter_context(stage.place())
        ours = child("benchmarks.peers.our_dispatcher:Dispatcher", place)
        reader = child("benchmarks.peers.raw:Publisher", place)
        template = reader.call("take", ours.call("publish_one"))
        raw = child("benchmarks.peers.raw:Publisher", stack.enter_context(stage.place()))
        raw.call("like", template)
        yield [
            Contender(
                RAW,
                UNIT,
                "publish and confirm, 500 unconfirmed at most, messages as ours; no database",
                partial(_drain, raw, count),
                RAW,
            ),
            Contender(
                RAW_TABLE,
                FLOOR,
                "the same, around each 500: select, skip locked, delete, commit",
                partial(_drain, raw, count, "fill_table", "drain_table"),
                RAW,
            ),
            Contender(
                CELERY_OUTBOX,
                OURS,
                "the dispatcher in one process: claim, publish, confirm, mark",
                partial(_drain, ours, count),
                RAW,
            ),
        ]


def run_redis(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure Redis."""
    count = COUNTS[size][0] // 2
    found = Section("dispatch-redis", f"dispatch: {count:,} rows to Redis", "messages/s")
    unit = ".delay() to Redis"
    with ExitStack() as stack:
        place = stack.enter_context(stage.place(redis=True))
        delay = stack.enter_context(stage.child("benchmarks.peers.stock:Caller", place, False))
        place = stack.enter_context(stage.place(redis=True))
        ours = stack.enter_context(stage.child("benchmarks.peers.our_dispatcher:Dispatcher", place))
        does = ".delay() in a loop; no database"
        found.lines = compete(
            [
                Contender(unit, UNIT, does, partial(_delays, delay, count), unit),
                Contender(
                    CELERY_OUTBOX,
                    OURS,
                    "the dispatcher in one process: claim, publish, mark",
                    partial(_drain, ours, count),
                    unit,
                ),
            ],
            rounds,
            say,
        )
    found.hold("dispatch to Redis", CELERY_OUTBOX, unit, 3.0)
    return found


def run_plot(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure RabbitMQ with backlogs of several sizes."""
    sizes = {
        "quick": [100, 300],
        "default": [1000, 3000, 10_000, 30_000, 100_000],
        "full": [1000, 3000, 10_000, 30_000, 100_000, 300_000],
    }[size]
    found = Section("dispatch-plot", "dispatch: rate against backlog", "messages/s")
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for count in sizes:
        with open_pipelines(stage, count) as contenders:
            lines = compete(contenders, rounds, partial(_say_of, say, count))
        for line in lines:
            if not line.rates:
                continue
            rate = Spread.of(line.rates)
            point = (count, rate.median, rate.least, rate.most)
            series.setdefault(line.name, []).append(point)
            line.name, line.unit = f"{line.name}, {count:,} rows", f"{line.unit}, {count:,} rows"
            found.lines.append(line)
    found.facts["series"] = series
    return found


def _say_of(say: Say, count: int, text: str) -> None:
    say(f"{count:,} rows  {text}")


def _drain(child: Child, count: int, fill: str = "fill", drain: str = "drain") -> float:
    child.call(fill, count)
    seconds: float = child.call(drain, timeout=600.0)
    _clear(child, count)
    return count / seconds


def _clear(child: Child, count: int) -> None:
    """See that all messages are there, and throw them away."""
    depth: Callable[[], int] = partial(child.call, "depth")
    assert depth() == count, f"{depth()} messages of {count} are in the queue"
    child.call("purge")


def _delays(child: Child, count: int) -> float:
    seconds: float = child.call("calls", count)
    child.call("clean")
    return count / seconds
