"""What the soak has left behind: in the tables, in the broker, and nowhere else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

from sqlalchemy import ColumnElement, Connection, Select, Table, func, literal_column, select

from celery_outbox.core.states import State
from tests.servers.rabbitmq import RabbitmqApi
from tests.soak.load import CHILD, ENDS, Request
from tests.steps import is_allowed

TRANSACTIONAL = ("pay", "slow_pay", "block", "order", "gather")

#: Lines of the journal that only the attempt writes which holds the lease.
ENDS_OF_AN_ATTEMPT = ("succeeded", "retrying", "quarantined", "rescued")

FINAL = ("succeeded", "quarantined")


@dataclass
class Verdict:
    """The count of everything that must not be, and of some things that may.

    :param lost: jobs that were asked for and are not there, or did not end as they should.
    :param ghosts: jobs of transactions that were rolled back.
    :param duplicated: transactional effects that are there more than once, or without the job.
    :param missing: transactional effects that are not there although their job succeeded.
    :param apart: transactional effects, and jobs enqueued with them, that were committed in another
        transaction than the success of their job: a death between the two would show it.
    :param stuck: jobs that have not ended, rows and messages that are still under way.
    :param gaps: jobs whose journal does not lead from their recording to their state.
    :param quarantined: how many ended there, by reason.
    :param reruns: runs of bodies beside the one that each job needs.
    """

    lost: list[str] = field(default_factory=list)
    ghosts: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    quarantined: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    reruns: int = 0

    @property
    def bad(self) -> dict[str, list[str]]:
        """What must be empty."""
        names = ("lost", "ghosts", "duplicated", "missing", "apart", "stuck", "gaps")
        return {name: getattr(self, name) for name in names}

    @property
    def is_good(self) -> bool:
        """Whether all of it is."""
        return not any(self.bad.values())


def unfinished(shop: ModuleType, connection: Connection) -> int:
    """How many jobs have not ended, and how many rows are to be published."""
    job, message = shop.outbox.tables.job.c, shop.outbox.tables.message.c
    jobs = connection.scalar(select(func.count()).where(job.finished_at.is_(None)))
    rows = connection.scalar(select(func.count()).where(message.published_at.is_(None)))
    return int(jobs or 0) + int(rows or 0) + _open_chords(shop, connection)


def _open_chords(shop: ModuleType, connection: Connection) -> int:
    chord = shop.outbox.tables.chord.c
    return int(connection.scalar(select(func.count()).where(chord.state != "done")) or 0)


def judge(
    shop: ModuleType, connection: Connection, broker: RabbitmqApi, requests: list[Request]
) -> Verdict:
    """Compare what was asked for with what is there."""
    tables = shop.outbox.tables
    rows = {row.id: row for row in connection.execute(select(tables.job))}
    effects = _count(connection, shop.effects)
    verdict = Verdict(jobs=len(rows))
    expected = dict(job for request in requests for job in request.jobs)
    for job_id, kind in expected.items():
        row = rows.get(job_id)
        if row is None:
            verdict.lost.append(f"{job_id}: no such job")
        elif row.state not in FINAL:
            verdict.stuck.append(f"{job_id}: {row.state}, attempt {row.attempt}")
        elif (row.state == "quarantined") != (kind in ENDS):
            verdict.lost.append(f"{job_id}: {row.state} ({row.reason}, {row.error_code})")
        elif row.state == "quarantined":
            verdict.quarantined[row.reason] += 1
            if row.reason not in ENDS[kind]:
                verdict.lost.append(f"{job_id}: in quarantine as {row.reason}")
        transactional = kind in TRANSACTIONAL
        wanted = int(transactional and row is not None and row.state == "succeeded")
        if effects[job_id] > wanted:
            verdict.duplicated.append(f"{job_id}: {effects[job_id]} effects, not {wanted}")
        elif effects[job_id] < wanted:
            verdict.missing.append(job_id)
    for job_id, row in rows.items():
        if job_id in expected:
            continue
        if job_id.startswith("bad-message-"):
            verdict.quarantined[f"message: {row.reason}"] += 1
        else:
            verdict.ghosts.append(job_id)
    verdict.reruns = sum(count - 1 for count in _count(connection, shop.runs).values())
    verdict.apart = _apart(shop, connection)
    verdict.gaps = _gaps(shop, connection)
    _look_for_leftovers(verdict, shop, connection, broker)
    return verdict


def _count(connection: Connection, table: object) -> Counter[str]:
    statement = select(table.c.job, func.count()).group_by(table.c.job)  # type: ignore[attr-defined]
    return Counter({job: number for job, number in connection.execute(statement)})


def _apart(shop: ModuleType, connection: Connection) -> list[str]:
    effect, event = shop.effects, shop.outbox.tables.event
    # The transaction that wrote a row (PostgreSQL documentation, section 5.5); lines of the journal
    # are never written twice.
    made_by = literal_column("xmin::text")
    successes = _made_by(connection, select(event.c.job_id, made_by).where(_is(event, "succeeded")))
    effects = _made_by(connection, select(effect.c.job, made_by))
    recorded = _made_by(connection, select(event.c.job_id, made_by).where(_is(event, "recorded")))
    found = [f"{job_id}: effect" for job_id, by in effects.items() if successes.get(job_id) != by]
    for job_id, by in recorded.items():
        parent, is_child, _ = job_id.partition(CHILD)
        if is_child and successes.get(parent) != by:
            found.append(f"{job_id}: enqueued")
    return found


def _made_by(connection: Connection, statement: Select[tuple[str, str]]) -> dict[str, str]:
    return {job_id: transaction for job_id, transaction in connection.execute(statement)}


def _is(event: Table, name: str) -> ColumnElement[bool]:
    return event.c.event == name


def _gaps(shop: ModuleType, connection: Connection) -> list[str]:
    event, job = shop.outbox.tables.event, shop.outbox.tables.job
    states: dict[str, State | None] = {}
    attempts: Counter[str] = Counter()
    found: list[str] = []
    lines = connection.execute(select(event).where(event.c.state.is_not(None)).order_by(event.c.id))
    for line in lines:
        before, after = states.get(line.job_id), State(line.state)
        if line.event == "claimed":
            attempts[line.job_id] += 1
        elif line.event in ENDS_OF_AN_ATTEMPT and line.attempt != attempts[line.job_id]:
            found.append(
                f"{line.job_id}: {line.event} by attempt {line.attempt} of another's lease"
            )
        if before is not after and not is_allowed(before, after):
            found.append(f"{line.job_id}: {before} -> {line.event} -> {after}")
        states[line.job_id] = after
    for row in connection.execute(select(job.c.id, job.c.state, job.c.attempt)):
        if states.get(row.id) != State(row.state):
            found.append(f"{row.id}: {row.state}, and {states.get(row.id)} in the journal")
        elif row.attempt != attempts[row.id]:
            found.append(f"{row.id}: attempt {row.attempt}, and {attempts[row.id]} claims")
    return found


def _look_for_leftovers(
    verdict: Verdict, shop: ModuleType, connection: Connection, broker: RabbitmqApi
) -> None:
    message, lease = shop.outbox.tables.message.c, shop.outbox.tables.job.c
    pending = connection.scalar(select(func.count()).where(message.published_at.is_(None)))
    if pending:
        verdict.stuck.append(f"{pending} outbox rows to publish")
    chords = _open_chords(shop, connection)
    if chords:
        verdict.stuck.append(f"{chords} chords")
    leased = connection.scalar(select(func.count()).where(lease.leased_by.is_not(None)))
    if leased:
        verdict.stuck.append(f"{leased} leases")
    left = broker.depth("celery")
    if left:
        verdict.stuck.append(f"{left} messages in the queue")
