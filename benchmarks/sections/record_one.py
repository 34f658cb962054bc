"""One job per transaction."""

from __future__ import annotations

from benchmarks.arithmetic import Spread
from benchmarks.contest import Say, compete
from benchmarks.results import FLOOR, OURS, UNIT, Bar, Section
from benchmarks.sections import callers as c
from benchmarks.stage import Stage

#: Operations of each of five slices of a round.
COUNTS = {"quick": 5, "default": 100, "full": 400}

IN_TRANSACTION = "celery-outbox, in a transaction"
WITH_ROW = "celery-outbox, with the caller's row"
ALONE = "celery-outbox, no transaction"
ROW_THEN_CALL = "the row, then confirmed .delay()"


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    found = Section("record-one", "record: one job per transaction", "jobs/s")
    count = COUNTS[size]
    with c.open_callers(stage, found, say) as callers:
        c.open_all(callers)
        unit = c.CONFIRMED
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
                    IN_TRANSACTION,
                    OURS,
                    "SQLAlchemy session: begin, .delay(), commit",
                    "calls_in_transactions",
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
                *callers.contender(
                    ALONE,
                    OURS,
                    ".delay() with no transaction of the caller's",
                    "calls_alone",
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
                *callers.peer(
                    "django-celery-outbox",
                    "transaction.atomic(): .delay()",
                    "calls_in_transactions",
                    count,
                    unit,
                ),
                *callers.peer(
                    "procrastinate",
                    "on the caller's psycopg connection: begin, defer(), commit",
                    "calls_in_transactions",
                    count,
                    unit,
                ),
                *callers.peer(
                    "pgqueuer",
                    "on the caller's psycopg connection: enqueue(), autocommitted",
                    "calls_in_transactions",
                    count,
                    unit,
                ),
                *callers.contender(
                    c.BARE,
                    FLOOR,
                    "psycopg2: begin, insert a row as wide as a recorded call, commit",
                    "calls_in_transactions",
                    count,
                    of=c.BARE,
                    unit=unit,
                ),
                *callers.contender(
                    WITH_ROW,
                    OURS,
                    "SQLAlchemy session: begin, insert a row, .delay(), commit",
                    "calls_with_a_row",
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
                *callers.contender(
                    ROW_THEN_CALL,
                    FLOOR,
                    "SQLAlchemy session: begin, insert a row, commit; then a confirmed .delay()",
                    "calls_after_a_row",
                    count,
                    of=unit,
                    unit=unit,
                ),
                *callers.contender(
                    "the caller's row alone",
                    FLOOR,
                    "SQLAlchemy session: begin, insert a row, commit",
                    "rows",
                    count,
                    of=c.OURS,
                    unit=unit,
                ),
            ],
            rounds,
            say,
            slices=5,
        )
        if callers.has(c.OURS):
            trips = callers.call(c.OURS, "round_trips")
            found.facts["round trips of a transaction"] = trips
            more = trips["the caller's row and one call"] - trips["the caller's row alone"]
            what = "round trips that a call adds to the caller's transaction"
            found.bars.append(Bar(what, Spread.of([more]), 1, at_most=True, measure=""))
    found.hold("record one, in a transaction of its own", IN_TRANSACTION, unit, 1.5)
    found.hold("the same work: the row and the job", WITH_ROW, ROW_THEN_CALL, 1.0)
    found.ahead(IN_TRANSACTION, list(c.PEERS))
    return found
