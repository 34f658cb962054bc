"""What PostgreSQL does in one statement is what the other databases do in several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import update

from celery_outbox.core.decisions import Run, decide
from celery_outbox.core.states import State
from celery_outbox.store import transitions
from celery_outbox.store.clock import db_after
from celery_outbox.store.job import Job
from celery_outbox.store.postgresql.running import claim_in_one
from tests.factories import Database, open_database

CLAIM: dict[str, Any] = {"actor": "worker-2", "lease": 60.0}

#: What may differ of jobs that wait, of which a worker may take some.
FACTS = {
    "as it is": {},
    "due later": {"available_at": db_after(60)},
    "over": {"expires_at": db_after(-1)},
    "over later": {"expires_at": db_after(60)},
    "of another task": {"task": "shop.another"},
    "of another service": {"relay": 1},
    "without attempts": {"attempt": 3},
}


@pytest.fixture
def database(postgresql_installed_url: str) -> Iterator[Database]:
    with open_database(postgresql_installed_url, init=False) as database:
        yield database


def put(database: Database, state: State, facts: dict[str, Any]) -> Job:
    job = database.put(state)
    column = database.tables.job.c
    database.execute(
        update(database.tables.job)
        .where(column.id == job.id)
        .values({"available_at": db_after(-1), **facts})
    )
    return database.job(job.id)


def claim(database: Database, job: Job) -> Any:
    return database.do(claim_in_one, job.id, task="shop.export", nonce=7, **CLAIM)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("state", State)
def test_it_takes_the_jobs_that_would_run_and_leaves_those_that_need_a_closer_look(
    database: Database, state: State, facts: dict[str, Any]
):
    job = put(database, state, facts)
    decision = decide(
        job.facts, now=job.now, redelivered=False, same_task=job.task == "shop.export"
    )
    waits = job.state in (State.QUEUED, State.RETRYING)
    expected = isinstance(decision, Run) and waits and not job.relay
    events = database.events(job.id)
    assert (claim(database, job) is not None) == expected
    if not expected:
        assert database.job(job.id).lease_token == job.lease_token
        assert database.events(job.id) == events


@pytest.mark.parametrize("state", [State.QUEUED, State.RETRYING])
def test_a_job_is_the_same_that_was_claimed_under_its_lock(database: Database, state: State):
    one, other = put(database, state, {}), put(database, state, {})
    row = claim(database, one)
    database.do(transitions.claim, other, nonce=7, **CLAIM)
    read, locked = database.job(one.id), database.job(other.id)
    assert differences(Job.from_row(row), read) == {"now"}
    assert differences(read, locked) <= {"id", "envelope_json", "now", *times(read)}
    assert database.events(one.id) == database.events(other.id)


def differences(one: Job, other: Job) -> set[str]:
    left, right = asdict(one), asdict(other)
    return {name for name in left if left[name] != right[name]}


def times(job: Job) -> set[str]:
    return {name for name, value in asdict(job).items() if isinstance(value, datetime)}
