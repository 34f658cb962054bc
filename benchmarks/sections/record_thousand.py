"""A thousand calls in one transaction."""

from __future__ import annotations

from benchmarks.arithmetic import Spread
from benchmarks.contest import Say, compete
from benchmarks.results import FLOOR, OURS, UNIT, Bar, Section
from benchmarks.sections import callers as c
from benchmarks.stage import Stage

#: Calls of a round.
COUNTS = {"quick": 50, "default": 1000, "full": 1000}


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    count = COUNTS[size]
    found = Section("record-1000", f"record: {count:,} .delay() in one transaction", "jobs/s")
    with c.open_callers(stage, found, say) as callers:
        c.open_all(callers)
        unit = c.CONFIRMED
        method = "calls_in_one_transaction"
        found.lines = compete(
            [
                *callers.contender(
                    unit,
                    UNIT,
                    ".delay() to RabbitMQ, and its confirm; no database",
                    "calls",
                    count,
                    of=unit,
                    unit=unit,
                ),
                *callers.contender(
                    c.UNCONFIRMED,
                    FLOOR,
                    ".delay() to RabbitMQ, written to the socket; no database",
                    "calls",
                    count,
                    of=c.UNCONFIRMED,
                    unit=unit,
                ),
                *callers.contender(
                    c.OURS,
                    OURS,
                    "SQLAlchemy session: begin, all .delay(), commit",
                    method,
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
                *callers.peer(
                    "django-celery-outbox",
                    "transaction.atomic(): all .delay()",
                    method,
                    count,
                    unit,
                ),
                *callers.peer(
                    "procrastinate",
                    "on the caller's psycopg connection: begin, all defer(), commit",
                    method,
                    count,
                    unit,
                ),
                *callers.peer(
                    "pgqueuer",
                    "on the caller's psycopg connection: begin, all enqueue(), commit",
                    method,
                    count,
                    unit,
                ),
                *callers.contender(
                    c.BARE,
                    FLOOR,
                    "SQLAlchemy: begin, all inserts one by one, commit",
                    method,
                    count,
                    of=c.BARE,
                    unit=unit,
                ),
            ],
            rounds,
            say,
            slices=1 if size == "quick" else 3,
        )
        if callers.has(c.OURS):
            trips = callers.call(c.OURS, "round_trips")
            found.facts["round trips of a transaction"] = trips
            more = trips["2,000 calls"] - trips["1,000 calls"]
            what = "round trips of another 1,000 calls"
            found.bars.append(Bar(what, Spread.of([more]), 10, at_most=True, measure=""))
    found.hold("record in one transaction", c.OURS, unit, 6.0)
    found.ahead(c.OURS, list(c.PEERS))
    return found
