"""MariaDB and MySQL: what runs all the time uses its index, with 100,000 rows present."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text

from celery_outbox.store import job as jobs
from celery_outbox.store import journal, messages, reports, republishing, transitions, workers
from tests.factories import Database, new_envelope, open_database
from tests.integration.statements import statements_of
from tests.servers.mariadb import Mariadb

pytestmark = pytest.mark.once

DIGITS = "(SELECT 0 AS d " + " ".join(f"UNION ALL SELECT {digit}" for digit in range(1, 10)) + ")"

#: As on PostgreSQL: most jobs have ended and were published long ago; of the others, some are due.
FILL = f"""
INSERT INTO outbox_job (id, task, queue, state, envelope, body, max_attempts, attempt,
    lease_token, leased_by, leased_until, recorded_at, available_at, expires_at, finished_at)
SELECT CONCAT('job-', n), 'shop.export', 'celery', state, :envelope, '[]', 3, 1, 1,
    CASE WHEN state = 'running' THEN 'worker' END,
    CASE WHEN state = 'running' THEN UTC_TIMESTAMP(6) + INTERVAL (MOD(n, 120) - 60) SECOND END,
    UTC_TIMESTAMP(6) - INTERVAL n SECOND, UTC_TIMESTAMP(6) - INTERVAL n SECOND,
    CASE WHEN MOD(n, 50) = 0 THEN UTC_TIMESTAMP(6) + INTERVAL (MOD(n, 10000) - 500) SECOND END,
    CASE WHEN state = 'succeeded' THEN UTC_TIMESTAMP(6) - INTERVAL n SECOND END
FROM (SELECT n, CASE WHEN MOD(n, 100) < 97 THEN 'succeeded' WHEN MOD(n, 100) = 97 THEN 'running'
    WHEN MOD(n, 100) = 98 THEN 'queued' ELSE 'retrying' END AS state
    FROM (SELECT 1 + a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d AS n FROM
        {DIGITS} a, {DIGITS} b, {DIGITS} c, {DIGITS} e, {DIGITS} f) AS numbers) AS numbered;
INSERT INTO outbox_message (job_id, kind, created_at, due_at, published_at)
SELECT id, 'task', recorded_at, available_at, finished_at FROM outbox_job;
INSERT INTO outbox_event (job_id, at, event)
SELECT id, recorded_at, 'recorded' FROM outbox_job;
ANALYZE TABLE outbox_job, outbox_message, outbox_event
"""


@pytest.fixture(scope="module")
def database(mariadb_server: Mariadb) -> Iterator[Database]:
    name = f"outbox_test_{os.getpid()}_query_plans"
    with open_database(mariadb_server.create_database(name)) as database:
        envelope = new_envelope().to_json()
        with database.engine.connect() as connection:
            for statement in FILL.split(";\n"):
                bound = {"envelope": envelope} if ":envelope" in statement else {}
                connection.execute(text(statement), bound)
            connection.commit()
        yield database
    mariadb_server.drop_database(name)


def plans(
    database: Database, step: Callable[..., Any], *args: Any, **options: Any
) -> list[list[Any]]:
    """Return how the server would run each statement of a function of the store: its tables."""
    with statements_of(database, step, *args, **options) as (connection, statements):
        return [
            list(connection.exec_driver_sql(f"EXPLAIN {each}", values).mappings())
            for each, values in statements
        ]


def test_due_messages_are_claimed_by_their_index_in_its_order(database: Database):
    locked, read, updated = plans(database, messages.claim, claim="c", lease=60, limit=500)
    [due] = locked
    assert due["key"] == "ix_outbox_message_due"
    assert due["type"] in ("range", "ref")
    # The index has the order, so that a batch ends the scan, and the locks.
    assert "filesort" not in (due["Extra"] or "")
    for step in (*read, *updated):
        assert step["key"] == "PRIMARY"
        assert int(step["rows"]) <= 1000


@pytest.mark.parametrize(
    ("step", "arguments", "indexes"),
    [
        (messages.seconds_until_due, (), {"ix_outbox_message_due"}),
        (jobs.lock_expired, (100,), {"ix_outbox_job_running", "ix_outbox_message_job"}),
        (jobs.lock_overdue, (100,), {"ix_outbox_job_expiring", "ix_outbox_message_job"}),
        (reports.due, (100,), {"ix_outbox_job_untold"}),
        (jobs.get, ("job-7",), {"PRIMARY", "ix_outbox_message_job"}),
        (jobs.lock, ("job-7",), {"PRIMARY", "ix_outbox_message_job"}),
        (jobs.first, ("job-7",), {"PRIMARY", "ix_outbox_message_job"}),
        (jobs.find, (), {"ix_outbox_job_recorded", "ix_outbox_message_job"}),
        (journal.read, ("job-7",), {"ix_outbox_event_job"}),
        (messages.has_pending, ("job-7",), {"ix_outbox_message_job"}),
        (messages.drop_pending, ("job-7",), {"ix_outbox_message_job"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_query_that_runs_all_the_time_uses_its_index(database, step, arguments, indexes):
    [plan] = plans(database, step, *arguments)
    assert {table["key"] for table in plan} == indexes
    assert not any("filesort" in (table["Extra"] or "") for table in plan)


def test_marking_a_batch_finds_its_rows_by_their_ids(database: Database):
    batch = database.do(messages.claim, claim="held", lease=600, limit=500)
    ids = [message.id for message in batch]
    for [table] in plans(database, messages.mark_published, ids, "held"):
        assert table["key"] == "PRIMARY"


def test_a_heartbeat_finds_its_jobs_by_their_ids(database: Database):
    ids = [f"job-{number}" for number in range(97, 5000, 100)]
    _, *beats = plans(database, workers.beat, "worker", ids, lease=60)
    assert len(beats) == 2
    for [table] in beats:
        assert table["key"] in ("PRIMARY", "ix_outbox_job_running")
        assert int(table["rows"]) <= 2000


def test_a_transition_reads_one_row_by_its_id(database: Database):
    job = database.job("job-97")
    end = {"attempt": 1, "actor": "worker", "result": None, "result_type": None}
    updated, dropped = plans(database, transitions.succeed, job.id, job.lease_token, **end)
    assert [table["key"] for table in updated] == ["PRIMARY"]
    assert [table["key"] for table in dropped] == ["ix_outbox_message_job"]


@pytest.mark.parametrize("step", [republishing.publish_again, republishing.unclaimed_queues])
def test_a_look_for_lost_messages_passes_over_what_has_ended(database: Database, step):
    options = (
        {"queue": "celery", "after": 3600, "limit": 100}
        if step is republishing.publish_again
        else {"after": 3600}
    )
    plan = plans(database, step, **options)[0]
    [outer] = [table for table in plan if table["table"] == "outbox_job"]
    assert outer["key"] in ("ix_outbox_job_waiting", "ix_outbox_job_quarantined")
    # Jobs that wait, or have not ended: not the 97,000 others.
    assert int(outer["rows"]) <= 10_000
