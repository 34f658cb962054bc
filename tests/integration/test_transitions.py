"""The SQL of each transition against the table of transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import pytest
from sqlalchemy import update

from celery_outbox.core.part import Part
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State, Transition, sources, target
from celery_outbox.store import continuing, quarantining, recording, relaying, transitions
from celery_outbox.store.continuing import NESTING
from celery_outbox.store.job import Job
from tests.factories import Database, new_envelope, new_job

ENDED: dict[str, Any] = {"attempt": 1, "actor": "worker"}
WHY: dict[str, Any] = {"reason": Reason.PERMANENT, "error_code": "ValueError", "copy": True}


def claim(database: Database, job: Job) -> bool:
    return bool(database.do(transitions.claim, job, actor="worker-2", lease=60))


def succeed(database: Database, job: Job) -> bool:
    result = {"result": b"1", "result_type": "application/json"}
    return database.do(transitions.succeed, job.id, job.lease_token, **result, **ENDED)


def retry(database: Database, job: Job) -> bool:
    return database.do(transitions.retry, job.id, job.lease_token, error_code="OSError", **ENDED)


def resume_as(database: Database, job: Job) -> bool:
    return database.do(
        transitions.resume_as,
        job.id,
        job.lease_token,
        new=new_job(job.id, body=b"[[2], {}, {}]"),
        part=Part(0, 0, 3),
        error_code=None,
        **ENDED,
    )


def replace_job(database: Database, job: Job) -> bool:
    return database.do(continuing.replace, job.id, job.lease_token, **ENDED)


def go_on(database: Database, job: Job) -> bool:
    step = new_job(job.id, task="shop.last", envelope=new_envelope(headers={NESTING: 1}))
    return database.do(continuing.go_on, job, step, actor="worker")


def quarantine(database: Database, job: Job) -> bool:
    return database.do(quarantining.quarantine, job.id, job.lease_token, **WHY, **ENDED)


def quarantine_waiting(database: Database, job: Job) -> bool:
    return database.do(quarantining.quarantine_waiting, job.id, **WHY, **ENDED)


def rescue(database: Database, job: Job) -> bool:
    return database.do(transitions.rescue, job, actor="maintenance", delay=0)


def replay(database: Database, job: Job) -> bool:
    return database.do(quarantining.replay, job, actor="person")


def discard(database: Database, job: Job) -> bool:
    return database.do(quarantining.discard, job, actor="person")


def cancel(database: Database, job: Job) -> bool:
    return database.do(transitions.cancel, job, actor="person")


def expire(database: Database, job: Job) -> bool:
    return database.do(transitions.expire, job.id, attempt=0, actor="maintenance")


def relay(database: Database, job: Job) -> bool:
    return database.do(relaying.relay, job.id, attempt=0, actor="dispatcher")


def record(database: Database, job: Job) -> bool:
    return database.do(recording.record, new_job(job.id), actor="caller")


def adopt(database: Database, job: Job) -> bool:
    return database.do(recording.adopt, new_job(job.id), actor="worker")


def quarantine_relayed(database: Database, job: Job) -> bool:
    why = {"reason": Reason.UNKNOWN_TASK, "copy": True, "relayed": True}
    end = {"attempt": job.attempt, "actor": "worker"}
    return database.do(quarantining.quarantine_waiting, job.id, **end, **why)


def adopt_relayed(database: Database, job: Job) -> bool:
    task_says = {"max_attempts": 5, "result_key": None}
    return database.do(relaying.adopt_relayed, job, actor="worker", **task_says)


def record_quarantined(database: Database, job: Job) -> bool:
    why = {"reason": Reason.UNKNOWN_JOB, "copy": True}
    return database.do(recording.record_quarantined, new_job(job.id), actor="worker", **why)


WAITING = {State.QUEUED, State.RETRYING}
#: Each function, the transition that it makes, and the part of its sources that is the function's.
STEPS: list[tuple[Callable[[Database, Job], bool], Transition, set[State] | None]] = [
    (record, Transition.RECORD, None),
    (adopt, Transition.ADOPT, set()),
    (record_quarantined, Transition.QUARANTINE, set()),
    (claim, Transition.CLAIM, WAITING),
    (succeed, Transition.SUCCEED, None),
    (retry, Transition.RETRY, None),
    (resume_as, Transition.RETRY, None),
    (replace_job, Transition.REPLACE, None),
    (go_on, Transition.CONTINUE, None),
    (rescue, Transition.RESCUE, None),
    (quarantine, Transition.QUARANTINE, {State.RUNNING}),
    (quarantine_waiting, Transition.QUARANTINE, WAITING),
    (replay, Transition.REPLAY, None),
    (discard, Transition.DISCARD, None),
    (cancel, Transition.CANCEL, None),
    (expire, Transition.EXPIRE, None),
    (relay, Transition.RELAY, None),
    (adopt_relayed, Transition.ADOPT, {State.RELAYED}),
    (quarantine_relayed, Transition.QUARANTINE, {*WAITING, State.RELAYED}),
]


def set_relay(database: Database, job: Job) -> None:
    table = database.tables.job
    database.execute(update(table).where(table.c.id == job.id).values(relay=1))


def test_a_job_that_a_worker_of_ours_took_is_not_relayed_any_more(database: Database):
    job = database.put(State.QUEUED, relay=True)
    assert claim(database, job)
    assert not database.job(job.id).relay
    assert retry(database, database.job(job.id))
    # The dispatcher comes late with the note that the message went out.
    assert not database.do(relaying.relay, job.id, attempt=0, actor="dispatcher")
    assert database.job(job.id).state is State.RETRYING


def everything(database: Database, job_id: str) -> Any:
    """Return the job's row without the time of reading, its messages and its journal."""
    row = asdict(replace(database.job(job_id), now=datetime.min.replace(tzinfo=timezone.utc)))
    return row, database.messages(job_id, pending=False), database.events(job_id)


@pytest.mark.parametrize(
    ("step", "transition", "part"), STEPS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_transition_takes_effect_exactly_from_the_states_of_the_table(
    database: Database, step, transition, part
):
    expected = set(sources(transition)) if part is None else part
    effective = set()
    for state in State:
        job = database.put(state)
        if step is relay:
            set_relay(database, job)
            job = database.job(job.id)
        before = everything(database, job.id)
        if step(database, job):
            effective.add(state)
            assert database.job(job.id).state is target(transition)
            assert database.events(job.id) == [*before[2], str(transition)]
        else:
            assert everything(database, job.id) == before, f"{state} was written to"
    assert effective == expected


def test_every_transition_has_its_function():
    made = {transition for _, transition, _ in STEPS}
    # Nobody resolves a job by hand yet.
    assert set(Transition) - made <= {Transition.RESOLVE}
    for step in (quarantine, quarantine_waiting):
        assert step in [each for each, _, _ in STEPS]
    parts = [part or set() for _, transition, part in STEPS if transition is Transition.QUARANTINE]
    assert set().union(*parts) == sources(Transition.QUARANTINE)


def test_what_may_come_from_nowhere_does(database: Database):
    for step, transition, _ in STEPS[:3]:
        nowhere = database.put(State.QUEUED)
        database.empty()
        assert step(database, nowhere)
        assert database.job(nowhere.id).state is target(transition)
        assert database.events(nowhere.id) == [str(transition)]


def test_a_claim_takes_a_running_job_only_after_its_lease_has_ended(database: Database):
    job = database.put(State.RUNNING)
    assert not claim(database, job)
    database.end_lease(job.id)
    assert claim(database, database.job(job.id))
    assert (database.job(job.id).lease_token, database.job(job.id).attempt) == (2, 2)


@pytest.mark.parametrize("step", [succeed, retry, resume_as, replace_job, quarantine, rescue])
def test_an_attempt_that_lost_its_lease_writes_nothing(database: Database, step):
    stale = database.put(State.RUNNING)
    database.end_lease(stale.id)
    claim(database, database.job(stale.id))
    before = everything(database, stale.id)
    assert step(database, stale) is False
    assert everything(database, stale.id) == before


@pytest.mark.parametrize("step", [claim, rescue])
def test_a_row_that_changed_since_it_was_read_is_not_taken(database: Database, step):
    job = database.put(State.RUNNING)
    database.end_lease(job.id)
    seen = database.job(job.id)
    assert claim(database, seen)
    database.end_lease(job.id)
    assert not step(database, seen)


@pytest.mark.parametrize("step", [step for step, _, _ in STEPS[3:]])
def test_a_job_that_is_not_there_is_not_changed(database: Database, step):
    job = database.put(State.RUNNING)
    before = everything(database, job.id)
    assert not step(database, replace(job, id="another"))
    assert everything(database, job.id) == before
    assert database.counts()[0] == 1
