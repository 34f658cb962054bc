"""What the database itself does not let anybody write."""

from __future__ import annotations

import pytest
from sqlalchemy import update
from sqlalchemy.exc import IntegrityError, OperationalError

from celery_outbox.core.states import State
from celery_outbox.store.clock import db_now
from tests.factories import Database, new_job

NOW = db_now()

#: PyMySQL does not know the error of a CHECK constraint, and calls it an operational one.
REFUSED = (IntegrityError, OperationalError)
LEASE = {"leased_by": "worker", "leased_until": NOW}


def set_values(database: Database, start: State, **values) -> None:
    job = database.put(start)
    table = database.tables.job
    database.execute(update(table).where(table.c.id == job.id).values(**values))


@pytest.mark.parametrize(
    ("state", "values", "constraint"),
    [
        (State.SUCCEEDED, {"state": "waiting"}, "job_state"),
        (State.SUCCEEDED, {"state": "QUEUED"}, "job_state"),
        (State.QUEUED, {"id": ""}, "job_id"),
        (State.QUEUED, {"attempt": -1}, "job_attempts"),
        (State.QUEUED, {"max_attempts": 0}, "job_attempts"),
        (State.RUNNING, {"leased_by": None}, "job_lease"),
        (State.RUNNING, {"leased_until": None}, "job_lease"),
        (State.RUNNING, {"leased_by": None, "leased_until": None}, "job_lease"),
        (State.QUEUED, {"leased_by": "worker"}, "job_lease"),
        (State.QUEUED, {"leased_until": NOW}, "job_lease"),
        (State.QUEUED, LEASE, "job_lease"),
        (State.SUCCEEDED, LEASE, "job_lease"),
        (State.RUNNING, {"state": "retrying"}, "job_lease"),
        (State.SUCCEEDED, {"finished_at": None}, "job_finished"),
        (State.RELAYED, {"finished_at": None}, "job_finished"),
        (State.QUARANTINED, {"finished_at": None}, "job_finished"),
        (State.QUEUED, {"state": "succeeded"}, "job_finished"),
        (State.RUNNING, {"finished_at": NOW}, "job_finished"),
        (State.RETRYING, {"finished_at": NOW}, "job_finished"),
        (State.QUARANTINED, {"reason": None}, "job_reason"),
        (State.QUEUED, {"reason": "permanent"}, "job_reason"),
        (State.CANCELLED, {"reason": "permanent"}, "job_reason"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else str(value),
)
def test_a_row_that_contradicts_itself_is_refused(database: Database, state, values, constraint):
    with pytest.raises(REFUSED, match=f"outbox_{constraint}"):
        set_values(database, state, **values)


@pytest.mark.parametrize("column", ["task", "state", "envelope", "max_attempts", "available_at"])
def test_a_row_is_complete(database: Database, column):
    with pytest.raises(IntegrityError, match=column):
        set_values(database, State.QUEUED, **{column: None})


def test_a_message_has_a_job_and_a_known_kind(database: Database):
    job = database.put(State.QUEUED)
    insert = "INSERT INTO outbox_message (job_id, kind, created_at, due_at) VALUES "
    now = "'2026-01-31 12:00:00.000000', '2026-01-31 12:00:00.000000'"
    with pytest.raises(IntegrityError, match=r"(?i)foreign key"):
        database.execute(f"{insert} ('another', 'task', {now})")
    with pytest.raises(REFUSED, match="outbox_message_kind"):
        database.execute(f"{insert} ('{job.id}', 'letter', {now})")


def test_a_lock_is_held_wholly_or_not_at_all(database: Database):
    with pytest.raises(REFUSED, match="outbox_lock_held"):
        database.execute("INSERT INTO outbox_lock (name, held_by) VALUES ('export:42', 'worker')")


def test_two_jobs_never_have_one_id(database: Database):
    job = database.put(State.QUEUED)
    with pytest.raises(IntegrityError):
        database.do(
            lambda connection, tables: connection.execute(
                tables.job.insert().values(
                    id=job.id,
                    task="t",
                    state="queued",
                    envelope="{}",
                    max_attempts=1,
                    available_at=NOW,
                )
            )
        )
    assert new_job().id != new_job().id


def test_the_journal_outlives_its_job_and_messages_do_not(database: Database):
    job = database.put(State.RETRYING)
    database.execute("DELETE FROM outbox_job")
    assert database.messages(job.id, pending=False) == []
    assert database.events(job.id) == ["recorded", "claimed", "retrying"]
