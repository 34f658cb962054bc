"""The queries that run all the time use their indexes, with 100,000 rows present, dead or alive."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from celery_outbox.store import job as jobs
from celery_outbox.store import journal, messages, publishing, reports, transitions, workers
from tests.factories import Database, new_envelope, open_database
from tests.integration.statements import statements_of
from tests.servers.postgresql import Postgresql

pytestmark = pytest.mark.once

ROWS = 100_000

#: Most jobs have ended and were published long ago; of those that have not, some are due.
FILL = f"""
INSERT INTO outbox_job (id, task, queue, state, envelope, body, max_attempts, attempt,
    lease_token, leased_by, leased_until, recorded_at, available_at, expires_at, finished_at)
SELECT 'job-' || n, 'shop.export', 'celery', state, :envelope, '[]', 3, 1, 1,
    CASE WHEN state = 'running' THEN 'worker' END,
    CASE WHEN state = 'running' THEN now() + (mod(n, 120) - 60) * interval '1 second' END,
    now() - n * interval '1 second', now() - n * interval '1 second',
    CASE WHEN mod(n, 50) = 0 THEN now() + (mod(n, 10000) - 500) * interval '1 second' END,
    CASE WHEN state = 'succeeded' THEN now() - n * interval '1 second' END
FROM (SELECT n, CASE WHEN mod(n, 100) < 97 THEN 'succeeded' WHEN mod(n, 100) = 97 THEN 'running'
    WHEN mod(n, 100) = 98 THEN 'queued' ELSE 'retrying' END AS state
    FROM generate_series(1, {ROWS}) n) AS numbered;
INSERT INTO outbox_message (job_id, kind, created_at, due_at, published_at)
SELECT id, 'task', recorded_at, available_at, finished_at FROM outbox_job;
INSERT INTO outbox_event (job_id, at, event)
SELECT id, recorded_at, 'recorded' FROM outbox_job
"""


@pytest.fixture(scope="module")
def database(postgresql_server: Postgresql) -> Iterator[Database]:
    name = f"outbox_test_{os.getpid()}_query_plans"
    with open_database(postgresql_server.create_database(name)) as database:
        envelope = new_envelope().to_json()
        for statement in FILL.split(";\n"):
            quoted = statement.replace(":envelope", f"'{envelope}'")
            database.do(lambda connection, _, sql=quoted: connection.exec_driver_sql(sql))
        with database.engine.connect().execution_options(
            isolation_level="AUTOCOMMIT"
        ) as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")
        yield database
    postgresql_server.drop_database(name)


def plans(
    database: Database,
    step: Callable[..., Any],
    *args: Any,
    explain: str = "EXPLAIN",
    **options: Any,
) -> list[str]:
    """Return how PostgreSQL would run each statement of a function of the store, or runs it."""
    with statements_of(database, step, *args, **options) as (connection, statements):
        return [_plan(connection, f"{explain} {each}", values) for each, values in statements]


def _plan(connection: Connection, statement: str, parameters: Any) -> str:
    plan = "\n".join(row[0] for row in connection.exec_driver_sql(statement, parameters))
    connection.rollback()
    return plan


def test_due_messages_are_claimed_by_their_partial_index(database: Database):
    [plan] = plans(database, messages.claim, claim="c", lease=60, limit=500)
    assert "outbox_message_pkey" in plan
    assert "outbox_job_pkey" in plan
    assert "Seq Scan" not in plan
    # The index has the order, so that a batch ends the scan: what is sorted is the batch.
    due = plan.partition("CTE due")[2].partition("CTE claimed")[0]
    assert "ix_outbox_message_due" in due
    assert "Sort" not in due


@pytest.mark.parametrize(
    ("step", "arguments", "index"),
    [
        (messages.seconds_until_due, (), "ix_outbox_message_due"),
        (jobs.lock_expired, (100,), "ix_outbox_job_running"),
        (jobs.lock_overdue, (100,), "ix_outbox_job_expiring"),
        (reports.due, (100,), "ix_outbox_job_untold"),
        (jobs.get, ("job-7",), "outbox_job_pkey"),
        (jobs.lock, ("job-7",), "ix_outbox_message_job"),
        (jobs.find, (), "ix_outbox_job_recorded"),
        (journal.read, ("job-7",), "ix_outbox_event_job"),
        (messages.has_pending, ("job-7",), "ix_outbox_message"),
        (messages.drop_pending, ("job-7",), "ix_outbox_message"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_query_that_runs_all_the_time_uses_its_index(database: Database, step, arguments, index):
    [plan] = plans(database, step, *arguments)
    assert index in plan
    assert "Seq Scan" not in plan


def test_marking_a_batch_finds_its_rows_by_their_ids(database: Database):
    batch = database.do(messages.claim, claim="held", lease=600, limit=500)
    [plan] = plans(database, publishing.mark, batch, "held", actor="dispatcher")
    assert "outbox_message_pkey" in plan
    assert "Seq Scan" not in plan


def test_a_heartbeat_finds_its_jobs_by_their_ids(database: Database):
    ids = [f"job-{number}" for number in range(97, 5000, 100)]
    for plan in plans(database, workers.beat, "worker", ids, lease=60):
        assert "Seq Scan on outbox_job" not in plan


def test_a_transition_reads_one_row_by_its_id(database: Database):
    job = database.job("job-97")
    end = {"attempt": 1, "actor": "worker", "result": None, "result_type": None}
    for plan in plans(database, transitions.succeed, job.id, job.lease_token, **end):
        assert "Index" in plan
        assert "Seq Scan" not in plan


#: Jobs that live and end while one transaction holds the oldest snapshot, and those that wait.
ENDED, WAITING, BATCH = 50_000, 1000, 500

RECORD = f"""
INSERT INTO outbox_job (id, task, queue, state, envelope, body, max_attempts, recorded_at,
    available_at)
SELECT 'job-' || n, 'shop.export', 'celery', 'queued', :envelope, '[]', 3, at, at
FROM (SELECT n, now() - ({ENDED + WAITING} - n) * interval '1 millisecond' AS at
    FROM generate_series(1, {ENDED + WAITING}) n) AS numbered;
INSERT INTO outbox_message (job_id, kind, created_at, due_at)
SELECT id, 'task', recorded_at, available_at FROM outbox_job
"""

#: What claim, mark, claim and settle do to the oldest rows: as many dead versions of each.
LIVE_AND_END = f"""
UPDATE outbox_message SET claimed_by = 'c', due_at = now() + interval '60 seconds'
WHERE id <= {ENDED};
UPDATE outbox_message SET published_at = now() WHERE id <= {ENDED};
UPDATE outbox_job SET state = 'running', attempt = 1, lease_token = 1, leased_by = 'worker',
    leased_until = now() - interval '1 second' WHERE id IN
    (SELECT job_id FROM outbox_message WHERE id <= {ENDED});
UPDATE outbox_job SET state = 'succeeded', leased_by = NULL, leased_until = NULL,
    finished_at = now() WHERE state = 'running'
"""


@pytest.fixture
def pinned(postgresql_url: str) -> Iterator[Database]:
    """A database whose oldest snapshot is held: no version of a row can be cleared away."""
    with open_database(postgresql_url) as database, database.engine.connect() as holder:
        holder.execution_options(isolation_level="REPEATABLE READ")
        holder.exec_driver_sql("SELECT count(*) FROM outbox_message")
        yield database


def test_claims_stay_on_their_index_while_a_long_transaction_keeps_dead_rows(pinned: Database):
    envelope = new_envelope().to_json()
    _run(pinned, RECORD.replace(":envelope", f"'{envelope}'"))
    measured = "EXPLAIN (ANALYZE, BUFFERS)"
    options = {"claim": "c", "lease": 60, "limit": BATCH}
    [first] = plans(pinned, messages.claim, explain=measured, **options)

    _run(pinned, LIVE_AND_END)

    [last] = plans(pinned, messages.claim, explain=measured, **options)
    for plan in (first, last):
        assert "ix_outbox_message_due" in plan
        assert "Seq Scan" not in plan
        assert f"rows={BATCH} loops=1" in plan
    # The dead entries are there, and passed over.
    assert _buffers(first) < _buffers(last) <= 3 * _buffers(first)
    # With little to do, too.
    for step, arguments, index in (
        (messages.seconds_until_due, (), "ix_outbox_message_due"),
        (jobs.lock_expired, (100,), "ix_outbox_job_running"),
        (jobs.lock, ("job-1",), "outbox_job_pkey"),
        (jobs.lock, (f"job-{ENDED + 1}",), "outbox_job_pkey"),
    ):
        [plan] = plans(pinned, step, *arguments, explain=measured)
        assert index in plan
        assert "Seq Scan" not in plan
        assert _buffers(plan) <= 3 * _buffers(first)


def _run(database: Database, script: str) -> None:
    """Run statements, and tell the planner what there is afterwards."""
    for statement in [*script.split(";\n"), "ANALYZE outbox_job, outbox_message"]:
        database.do(lambda connection, _, sql=statement: connection.exec_driver_sql(sql))


def _buffers(plan: str) -> int:
    """Return how many pages a statement read, cached or not, from its measured plan."""
    found = re.search(r"Buffers: shared (?:hit=(\d+))?(?: ?read=(\d+))?", plan)
    assert found is not None, plan
    return sum(int(number or 0) for number in found.groups())
