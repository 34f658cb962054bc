"""Ten thousand jobs at once."""

from __future__ import annotations

from benchmarks.contest import Contender, Say, compete
from benchmarks.results import FLOOR, OURS, UNIT, Bar, Section
from benchmarks.sections import callers as c
from benchmarks.stage import Stage

#: Jobs of a round; the unit makes fewer, one by one.
COUNTS = {"quick": (200, 50), "default": (10_000, 1000), "full": (10_000, 10_000)}

MANY = "celery-outbox, record_many"
GROUP = "celery-outbox, a group"


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    count, single = COUNTS[size]
    found = Section("record-many", f"record: {count:,} jobs in bulk", "jobs/s")
    with c.open_callers(stage, found, say) as callers:
        callers.open(c.CONFIRMED, "benchmarks.peers.stock:Caller", True)
        callers.open(c.OURS, "benchmarks.peers.ours:Caller")
        callers.open_peers()
        callers.open(c.BARE, "benchmarks.peers.bare:Caller")
        unit = c.CONFIRMED
        many: list[Contender] = []
        if callers.has(c.OURS) and callers.call(c.OURS, "has_record_many"):
            many = callers.contender(
                MANY,
                OURS,
                "SQLAlchemy session: begin, record_many(), commit",
                "record_many",
                count,
                of=c.OURS,
                unit=unit,
            )
        else:
            found.notes.append("this version has no record_many")
        found.lines = compete(
            [
                *callers.contender(
                    unit,
                    UNIT,
                    f"{single:,} times .delay() to RabbitMQ, and its confirm; no database",
                    "calls",
                    single,
                    of=unit,
                    unit=unit,
                ),
                *many,
                *callers.contender(
                    GROUP,
                    OURS,
                    "SQLAlchemy session: begin, a group of all, commit",
                    "group_in_one_transaction",
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
                *callers.peer("procrastinate", "batch_defer()", "bulk", count, unit),
                *callers.peer("pgqueuer", "enqueue() of lists", "bulk", count, unit),
                *callers.contender(
                    c.BARE,
                    FLOOR,
                    "SQLAlchemy: begin, one insert of all, commit",
                    "bulk",
                    count,
                    of=c.BARE,
                    unit=unit,
                ),
            ],
            rounds,
            say,
        )
    if many:
        found.hold("record_many", MANY, unit, 34.0)
    else:
        found.bars.append(Bar("record_many", None, 34.0))
    found.ahead(MANY, ["procrastinate"])
    return found
