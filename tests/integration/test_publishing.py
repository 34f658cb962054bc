"""Outbox rows: claimed by one dispatcher at a time, marked by the one that holds them."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

from sqlalchemy import event

from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.store import messages, publishing, recording, transitions
from celery_outbox.store.clock import db_after
from celery_outbox.store.engine import write_transaction
from tests.factories import Database, new_job, open_database


def claim(database: Database, name: str = "claim-1", *, lease: float = 60, limit: int = 100):
    return database.do(messages.claim, claim=name, lease=lease, limit=limit)


def free(database: Database) -> None:
    """Let every dispatcher's lease end."""
    database.execute(database.tables.message.update().values(due_at=db_after(-1)))


def test_rows_are_claimed_once_oldest_first(database: Database):
    expected = [database.put(State.QUEUED).id for _ in range(3)]
    assert [message.job_id for message in claim(database, limit=2)] == expected[:2]
    assert [message.job_id for message in claim(database, "claim-2")] == expected[2:]
    assert claim(database, "claim-3") == []


def test_what_is_not_due_is_left_alone(database: Database):
    later = datetime(2126, 1, 1, tzinfo=timezone.utc)
    database.put(State.QUEUED, available_at=later)
    assert claim(database) == []


def test_rows_of_a_dispatcher_that_died_are_claimed_again_when_its_lease_ends(database: Database):
    job = database.put(State.QUEUED)
    claim(database)
    free(database)
    assert [message.job_id for message in claim(database, "claim-2")] == [job.id]


def test_a_body_is_read_only_for_another_service(database: Database):
    database.put(State.QUEUED, body=b"ours")
    database.put(State.QUEUED, body=b"theirs", relay=True)
    assert [message.body for message in claim(database)] == [None, b"theirs"]


def test_a_lost_claim_marks_nothing(database: Database):
    job = database.put(State.QUEUED)
    lost = claim(database)
    free(database)
    held = claim(database, "claim-2")
    assert database.do(publishing.mark, lost, "claim-1", actor="dispatcher-1") == set()
    assert database.job(job.id).published_at is None
    assert database.do(publishing.mark, held, "claim-2", actor="dispatcher-2") == {held[0].id}
    assert database.job(job.id).published_at is not None
    assert database.events(job.id) == ["recorded", "published"]


def test_a_mark_takes_effect_once(database: Database):
    job = database.put(State.QUEUED)
    claimed = claim(database)
    assert database.do(publishing.mark, claimed, "claim-1", actor="d")
    assert not database.do(publishing.mark, claimed, "claim-1", actor="d")
    assert database.events(job.id) == ["recorded", "published"]


def test_a_released_row_is_due_again_and_a_lost_claim_releases_nothing(database: Database):
    database.put(State.QUEUED)
    [message] = claim(database)
    database.do(messages.release, [message.id], "another claim")
    assert claim(database) == []
    database.do(messages.release, [message.id], "claim-1")
    assert len(claim(database)) == 1


def test_the_message_of_another_service_ends_its_job_when_it_is_confirmed(database: Database):
    job = database.put(State.QUEUED, relay=True)
    database.do(publishing.mark, claim(database), "claim-1", actor="d")
    assert database.job(job.id).state is State.RELAYED
    assert database.events(job.id) == ["recorded", "relayed", "published"]


def test_the_id_of_a_row_is_never_that_of_another_row_later(database: Database):
    # A dispatcher that is late may still drop the row which it once claimed.
    database.put(State.QUEUED)
    [first] = claim(database)
    database.do(messages.drop, [first.id], "claim-1")
    kept = database.put(State.QUEUED)
    database.do(messages.drop, [first.id], "claim-1")
    assert [row.job_id for row in database.messages()] == [kept.id]


def test_a_refused_message_quarantines_its_job_with_a_copy(database: Database):
    job = database.put(State.QUEUED)
    [message] = claim(database)
    assert database.do(publishing.refuse, message, Reason.TOO_LARGE, "claim-1", actor="d")
    assert (database.job(job.id).state, database.job(job.id).reason) == (
        State.QUARANTINED,
        "too_large",
    )
    assert [row.kind for row in database.messages(job.id)] == ["quarantine"]


def test_a_refused_duplicate_does_not_touch_a_job_that_runs(database: Database):
    job = database.put(State.QUEUED)
    [message] = claim(database)
    database.do(transitions.claim, database.job(job.id), actor="worker", lease=60)
    assert not database.do(publishing.refuse, message, Reason.UNROUTABLE, "claim-1", actor="d")
    assert database.job(job.id).state is State.RUNNING


def test_seconds_until_due_count_by_the_databases_clock(database: Database):
    assert database.do(messages.seconds_until_due) is None
    database.put(State.QUEUED)
    assert database.do(messages.seconds_until_due) <= 0
    claim(database, lease=60)
    assert 50 < database.do(messages.seconds_until_due) <= 60


def test_no_row_is_claimed_twice_by_dispatchers_that_run_side_by_side(database: Database):
    jobs = [database.put(State.QUEUED).id for _ in range(60)]
    ready, claimed, errors = threading.Barrier(4), [], []

    def dispatch(name: str) -> None:
        try:
            ready.wait()
            number = 0
            while batch := claim(database, f"{name}:{(number := number + 1)}", limit=5):
                claimed.extend(message.job_id for message in batch)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=dispatch, args=(f"dispatcher-{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(claimed) == sorted(jobs)


def test_a_claim_does_not_wait_for_rows_that_another_transaction_holds(
    postgresql_installed_url: str,
):
    with open_database(postgresql_installed_url, init=False) as database:
        first, second = database.put(State.QUEUED).id, database.put(State.QUEUED).id
        with write_transaction(database.engine) as connection:
            options = {"claim": "claim-1", "lease": 60, "limit": 1}
            [held] = messages.claim(connection, database.tables, **options)
            assert held.job_id == first
            assert [message.job_id for message in claim(database, "claim-2")] == [second]


def test_recording_a_job_takes_one_statement_in_all_or_for_each_table(database: Database):
    statements = []

    def count(connection, cursor, statement, *_):
        statements.append(statement.split()[0])

    event.listen(database.engine, "before_cursor_execute", count)
    database.do(recording.record, new_job(), actor="caller")
    event.remove(database.engine, "before_cursor_execute", count)
    inserts = ["WITH"] if database.engine.dialect.name == "postgresql" else ["INSERT"] * 3
    assert [word for word in statements if word != "BEGIN"] == inserts
