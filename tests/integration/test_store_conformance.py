"""What each transition leaves behind: one suite for every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_outbox.core.part import Part
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.store import (
    continuing,
    dialects,
    journal,
    quarantining,
    recording,
    transitions,
    workers,
)
from celery_outbox.store import job as jobs
from tests.factories import Database, new_envelope, new_job

SOON = timedelta(seconds=5)
ENDED: dict[str, Any] = {"attempt": 1, "actor": "worker"}


def kinds(database: Database, job_id: str) -> list[str]:
    """Return the kinds of the job's rows that are still to be published."""
    return [message.kind for message in database.messages(job_id)]


def test_a_recorded_job_has_one_message_and_one_journal_line(database: Database):
    job = database.put(State.QUEUED)
    assert (job.attempt, job.deliveries, job.lease_token) == (0, 0, 0)
    assert kinds(database, job.id) == ["task"]
    assert database.events(job.id) == ["recorded"]
    assert abs(job.recorded_at - datetime.now(timezone.utc)) < SOON
    assert job.recorded_at.tzinfo is timezone.utc


def test_a_second_record_of_an_id_changes_nothing(database: Database):
    job = database.put(State.QUEUED)
    assert not database.do(recording.record, new_job(job.id, task="another"), actor="caller")
    assert not database.do(recording.adopt, new_job(job.id, task="another"), actor="worker")
    assert database.job(job.id).task == "shop.export"
    assert database.counts() == (1, 1, 1)


def test_many_rows_are_inserted_but_for_those_that_are_there(database: Database):
    def insert(connection, tables, names):
        rows = [{"id": name, "hostname": "h" * 200, "pid": 1} for name in names]
        return dialects.insert_absent(connection, tables.worker, rows)

    assert database.do(insert, ["w-3", "w-1600"]) == {"w-3", "w-1600"}
    names = [f"w-{number}" for number in range(1700)]
    assert database.do(insert, names) == set(names) - {"w-3", "w-1600"}
    assert database.do(insert, names) == set()
    assert database.do(insert, []) == set()


def test_an_adopted_job_needs_no_message_for_it_has_been_delivered(database: Database):
    assert database.do(recording.adopt, new_job("plain"), actor="worker")
    assert kinds(database, "plain") == []
    assert database.events("plain") == ["adopted"]


def test_a_claim_gives_a_lease_a_token_and_counts_attempt_and_delivery(database: Database):
    job = database.put(State.RUNNING)
    assert (job.attempt, job.deliveries, job.lease_token, job.leased_by) == (1, 1, 1, "worker")
    assert abs(job.leased_until - job.now - timedelta(seconds=60)) < SOON
    assert job.started_at is not None


def test_success_stores_the_result_and_takes_back_what_was_to_be_published(database: Database):
    job = database.put(State.SUCCEEDED)
    assert (job.result, job.result_type) == (b"1", "json")
    assert (job.leased_by, job.leased_until, job.error_code) == (None, None, None)
    assert job.finished_at is not None
    assert kinds(database, job.id) == []


def test_a_retry_puts_one_message_into_the_outbox_due_when_the_job_is(database: Database):
    job = database.put(State.RUNNING)
    database.do(transitions.retry, job.id, 1, error_code="OSError", delay=30, **ENDED)
    job = database.job(job.id)
    [message] = database.messages(job.id)
    assert abs(job.available_at - job.now - timedelta(seconds=30)) < SOON
    # Not before: a worker would send it back into the outbox.
    assert job.available_at <= message.due_at < job.available_at + SOON
    assert (job.state, job.error_code) == (State.RETRYING, "OSError")
    assert database.events(job.id) == ["recorded", "claimed", "retrying"]


def test_a_rescue_is_a_retry_of_a_lost_worker(database: Database):
    job = database.put(State.RUNNING)
    database.end_lease(job.id)
    assert database.do(transitions.rescue, database.job(job.id), actor="maintenance", delay=0)
    assert kinds(database, job.id) == ["task"]
    assert database.job(job.id).error_code == "lost_worker"
    assert database.events(job.id)[-1] == "rescued"


@pytest.mark.parametrize("copy", [False, True])
def test_quarantine_has_a_reason_and_a_copy_where_the_broker_makes_none(database: Database, copy):
    job = database.put(State.RUNNING)
    why = {"reason": Reason.TIME_LIMIT, "error_code": "TimeLimitExceeded", "copy": copy}
    assert database.do(quarantining.quarantine, job.id, 1, error_detail="x", **why, **ENDED)
    job = database.job(job.id)
    assert (job.reason, job.source, job.error_code) == ("time_limit", "settle", "TimeLimitExceeded")
    assert kinds(database, job.id) == (["quarantine"] if copy else [])
    line = database.do(journal.read, job.id)[-1]
    assert (line.event, line.state, line.reason) == ("quarantined", "quarantined", "time_limit")


def test_a_waiting_job_that_the_broker_refused_is_quarantined_by_the_broker(database: Database):
    job = database.put(State.QUEUED)
    why = {"reason": Reason.UNROUTABLE, "copy": True}
    assert database.do(quarantining.quarantine_waiting, job.id, attempt=0, actor="d", **why)
    assert (database.job(job.id).source, database.job(job.id).reason) == ("broker", "unroutable")
    assert kinds(database, job.id) == ["quarantine"]


def test_a_replay_gives_a_quarantined_job_all_its_attempts_back(database: Database):
    job = database.put(State.QUARANTINED, expires_at=datetime(2026, 1, 1, tzinfo=timezone.utc))
    assert database.do(quarantining.replay, job, actor="person")
    again = database.job(job.id)
    assert (again.state, again.attempt, again.lease_token) == (State.QUEUED, 0, job.lease_token)
    assert (again.reason, again.source, again.error_code, again.finished_at) == (None,) * 4
    assert again.expires_at is None
    assert kinds(database, job.id) == ["task"]


def test_a_discarded_job_is_cancelled_and_its_journal_keeps_why_it_was_there(database: Database):
    job = database.put(State.QUARANTINED)
    assert database.do(quarantining.discard, job, actor="person")
    assert database.job(job.id).state is State.CANCELLED
    assert [line.reason for line in database.do(journal.read, job.id)][-2:] == ["permanent", None]


@pytest.mark.parametrize("state", [State.CANCELLED, State.EXPIRED])
def test_a_job_that_will_not_run_leaves_nothing_to_publish(database: Database, state):
    job = database.put(state)
    assert job.finished_at is not None
    assert kinds(database, job.id) == []


def test_a_deferred_delivery_comes_back_once_however_many_copies_there_are(database: Database):
    job = database.put(State.RUNNING)
    database.execute(database.tables.message.delete())
    for _ in range(3):
        database.do(transitions.defer, job, until=job.leased_until, actor="worker-2")
    [message] = database.messages(job.id)
    assert message.due_at == job.leased_until
    assert database.job(job.id).deliveries == 4
    assert database.events(job.id)[-3:] == ["deferred"] * 3


def test_a_duplicate_is_counted_and_written_down(database: Database):
    job = database.put(State.SUCCEEDED)
    database.do(transitions.count_delivery, job, event="duplicate", actor="worker-2")
    assert database.job(job.id).deliveries == 2
    line = database.do(journal.read, job.id)[-1]
    assert (line.event, line.state) == ("duplicate", "succeeded")


def test_a_body_that_sends_its_own_id_again_goes_on_as_what_it_sent(database: Database):
    job = database.put(State.RUNNING, max_attempts=1)
    envelope = new_envelope(queue="slow")
    sent = new_job(job.id, queue="slow", envelope=envelope, body=b"[[2], {}, {}]", max_attempts=1)
    how: dict[str, Any] = {"new": sent, "part": Part(4, 1, 3), "error_code": None}
    took = database.do(transitions.resume_as, job.id, 1, **how, **ENDED)
    again = database.job(job.id)
    assert took
    assert (again.state, again.queue, again.body) == (State.RETRYING, "slow", b"[[2], {}, {}]")
    assert again.part == Part(4, 1, 3)
    assert kinds(database, job.id) == ["task"]


def test_a_step_that_goes_on_for_a_replaced_job_begins_a_part_of_its_own(database: Database):
    job = database.put(State.RUNNING)
    database.do(continuing.replace, job.id, job.lease_token, **ENDED)
    replaced = database.job(job.id)
    assert replaced.part == Part(1, 1, 3)
    step = new_job(job.id, task="shop.last", max_attempts=5)
    assert database.do(continuing.go_on, replaced, step, actor="worker-1")
    assert database.job(job.id).part == Part(1, 1, 6)
    database.do(transitions.claim, database.job(job.id), actor="worker", lease=60)
    why: dict[str, Any] = {"reason": Reason.PERMANENT, "error_code": "ValueError", "copy": False}
    database.do(quarantining.quarantine, job.id, 2, attempt=2, actor="worker", **why)
    database.do(quarantining.replay, database.job(job.id), actor="person")
    # It has all the attempts of its present task again.
    assert (database.job(job.id).attempt, database.job(job.id).part) == (0, Part(1, 0, 5))


def test_a_heartbeat_extends_the_leases_that_its_worker_still_runs(database: Database):
    mine, forgotten, ended, taken = (database.put(State.RUNNING) for _ in range(4))
    database.end_lease(ended.id)
    database.end_lease(taken.id)
    database.do(transitions.claim, database.job(taken.id), actor="worker-2", lease=60)
    running = [mine.id, ended.id, taken.id, "unknown"]
    assert database.do(workers.beat, "worker", running, lease=600) == 2
    assert database.job(mine.id).leased_until > mine.leased_until + SOON
    assert database.job(forgotten.id).leased_until == forgotten.leased_until
    assert database.do(workers.beat, "namesake", running, lease=600) == 0


@pytest.mark.parametrize("installed_url", ["postgresql", "mariadb"], indirect=True)
def test_a_job_that_a_frozen_process_is_ending_does_not_end_the_leases_of_the_others(database):
    for job_id in ("job-1", "job-2"):
        database.put(State.RUNNING, job_id=job_id)
        database.end_lease(job_id)
    with database.engine.begin() as frozen, database.engine.begin() as connection:
        jobs.lock(frozen, database.tables, "job-1")
        # Whoever waits for the frozen one fails.
        database.wait_for_locks(connection, 1)
        both = ["job-1", "job-2"]
        assert workers.beat(connection, database.tables, "worker", both, lease=60) == 1
    assert [job.id for job in database.do(jobs.lock_expired, 10)] == ["job-1"]


def test_expired_leases_and_overdue_jobs_are_found_oldest_first(database: Database):
    past = [datetime(2026, 1, day, tzinfo=timezone.utc) for day in (2, 1)]
    overdue = [database.put(State.QUEUED, expires_at=at).id for at in past]
    database.put(State.QUEUED, expires_at=datetime(2126, 1, 1, tzinfo=timezone.utc))
    database.put(State.SUCCEEDED, expires_at=past[0])
    lost, _ = database.put(State.RUNNING, expires_at=past[0]).id, database.put(State.RUNNING)
    database.end_lease(lost)
    assert [job.id for job in database.do(jobs.lock_expired, 10)] == [lost]
    assert [job.id for job in database.do(jobs.lock_overdue, 10)] == overdue[::-1]
    assert len(database.do(jobs.lock_overdue, 1)) == 1


@pytest.mark.parametrize("text", ["a\x00b", "'; DROP TABLE outbox_job; --", "\U0001f4c8" * 40])
def test_hostile_text_is_data(database: Database, text):
    envelope = new_envelope(headers={"id": "x", "note": text})
    job = database.put(State.QUEUED, envelope=envelope, body=text.encode())
    assert database.job(job.id).envelope.headers["note"] == text
    assert database.job(job.id).body == text.encode()


def test_every_transition_of_a_long_life_is_in_the_journal_without_a_gap(database: Database):
    job = database.put(State.RETRYING)
    database.do(transitions.claim, database.job(job.id), actor="worker-2", lease=60)
    database.end_lease(job.id)
    database.do(transitions.rescue, database.job(job.id), actor="maintenance", delay=0)
    database.do(transitions.claim, database.job(job.id), actor="worker-3", lease=60)
    why = {"reason": Reason.PERMANENT, "error_code": "ValueError", "copy": False}
    database.do(
        quarantining.quarantine,
        job.id,
        3,
        attempt=3,
        actor="worker-3",
        **why,
    )
    database.do(quarantining.replay, database.job(job.id), actor="person")
    database.do(transitions.cancel, database.job(job.id), actor="person")
    lines = database.do(journal.read, job.id)
    assert [(line.event, line.state, line.attempt) for line in lines] == [
        ("recorded", "queued", 0),
        ("claimed", "running", 1),
        ("retrying", "retrying", 1),
        ("claimed", "running", 2),
        ("rescued", "retrying", 2),
        ("claimed", "running", 3),
        ("quarantined", "quarantined", 3),
        ("replayed", "queued", 0),
        ("cancelled", "cancelled", 0),
    ]
    assert [line.at for line in lines] == sorted(line.at for line in lines)
