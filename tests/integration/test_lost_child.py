"""What the worker's main process writes for a pool process that is gone."""

from __future__ import annotations

import pytest

from celery_outbox import Outbox, RetryPolicy
from celery_outbox.core.reasons import Reason
from celery_outbox.execute.outside import end_lost
from celery_outbox.store import transitions
from tests.factories import Database, add_task


def lose(outbox: Outbox, attempts_before: int) -> None:
    task = outbox.app.tasks["shop.export"]
    end_lost(outbox.guard, task, "job-1", Reason.LOST_WORKER, attempts_before)


@pytest.fixture
def task(outbox: Outbox):
    task = add_task(outbox.app, retry_policy=RetryPolicy(2, delay=0.0))
    task.apply_async(task_id="job-1")
    return task


def claim(outbox: Outbox, recorded: Database) -> None:
    recorded.do(transitions.claim, recorded.job("job-1"), actor=outbox.worker_id, lease=60)


def test_an_attempt_of_a_lost_process_is_followed_by_another(outbox, recorded, task):
    claim(outbox, recorded)
    lose(outbox, 0)
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.error_code) == ("retrying", 1, "lost_worker")


def test_a_process_that_died_before_its_claim_counts_until_the_limit(outbox, recorded, task):
    lose(outbox, 0)
    assert (recorded.job("job-1").state, recorded.job("job-1").attempt) == ("retrying", 1)
    lose(outbox, 1)
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.reason) == ("quarantined", 2, "lost_worker")


def test_a_later_attempt_in_the_same_worker_is_left_alone(outbox, recorded, task):
    claim(outbox, recorded)
    recorded.end_lease("job-1")
    claim(outbox, recorded)
    # The process of the first attempt is found dead only now.
    lose(outbox, 0)
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.lease_token) == ("running", 2, 2)


def test_another_workers_attempt_is_left_alone(outbox, recorded, task):
    recorded.do(transitions.claim, recorded.job("job-1"), actor="another", lease=60)
    lose(outbox, 0)
    assert recorded.job("job-1").leased_by == "another"


def test_an_attempt_that_has_ended_is_left_alone(outbox, recorded, task):
    claim(outbox, recorded)
    lose(outbox, 0)
    lose(outbox, 0)
    assert recorded.events("job-1") == ["recorded", "claimed", "retrying"]
