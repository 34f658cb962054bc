"""What bodies and callers are told, as Celery would tell them; found with Celery's own tests."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Task, signals
from celery.exceptions import Reject

from celery_outbox import Outbox, RetryPolicy
from tests.factories import Database
from tests.integration.delivering import add_task, deliver
from tests.wait import eventually

AT_ONCE = RetryPolicy(4, delay=0.0)


@pytest.fixture
def outbox(outbox: Outbox) -> Outbox:
    """An outbox whose results of Celery's own are kept in memory."""
    outbox.app.conf.result_backend = "cache+memory://"
    return outbox


def test_a_body_sees_that_it_is_delivered_again_unless_it_asked_for_it(
    outbox: Outbox, recorded: Database
) -> None:
    seen: list[bool] = []

    def body(self: Task) -> str:
        seen.append(self.request.delivery_info["redelivered"])
        if len(seen) == 1:
            raise Reject("not now", requeue=True)
        if len(seen) == 2:
            raise self.retry(countdown=0)
        if len(seen) == 3:
            raise ConnectionError
        return "done"

    task = add_task(outbox.app, body, bind=True, retry_policy=AT_ONCE)
    task.apply_async(task_id="job-1")
    for _ in range(4):
        deliver(task, "job-1")

    assert recorded.job("job-1").state == "succeeded"
    # After Reject, after self.retry(), after a failure.
    assert seen == [False, True, False, True]


def test_a_body_sees_for_when_it_was_called(outbox: Outbox, recorded: Database) -> None:
    seen: list[str | None] = []
    task = add_task(outbox.app, lambda self: seen.append(self.request.eta), bind=True)
    task.apply_async(task_id="now")
    before = datetime.now(timezone.utc)
    task.apply_async(task_id="later", countdown=0.5)
    deliver(task, "now")
    eventually(lambda: deliver(task, "later") and recorded.job("later").state == "succeeded")

    assert seen[0] is None
    assert datetime.fromisoformat(str(seen[1])) - before > timedelta(seconds=0.4)


def expire(outbox: Outbox) -> None:
    """End it as maintenance does, while its message is in the queue."""
    assert outbox.maintenance.run().expired == 1


def cancel(outbox: Outbox) -> None:
    """Cancel it as a person does, while its message is in the queue."""
    outbox.control.cancel("told-False")


@pytest.mark.parametrize(("end", "expired"), [(expire, True), (cancel, False)])
def test_a_caller_who_waits_is_told_that_the_job_will_not_run(
    outbox: Outbox, recorded: Database, end: Any, expired: bool
) -> None:
    runs: list[int] = []
    told: list[bool] = []
    task = add_task(outbox.app, lambda: runs.append(1))
    # Celery's backend in memory is one for all tests, and keeps a first result.
    job_id = f"told-{expired}"
    late = datetime.now(timezone.utc) - timedelta(seconds=5) if expired else None
    result = task.apply_async(task_id=job_id, expires=late)
    end(outbox)

    def revoked(expired: bool, **_: Any) -> None:
        told.append(expired)

    signals.task_revoked.connect(revoked)
    try:
        assert deliver(task, job_id) == "IGNORED"
    finally:
        signals.task_revoked.disconnect(revoked)

    assert (result.state, runs, told) == ("REVOKED", [], [expired])
