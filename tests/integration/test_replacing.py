"""A job that is replaced by a chain, group or chord ends with the last step, under its own id."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group

from celery_outbox import Outbox, RetryPolicy
from celery_outbox.core.states import State
from celery_outbox.store import transitions
from tests.factories import Database
from tests.integration.delivering import add_task, again, deliver, raising


class Shop:
    """An app with a task that is replaced, and the tasks that stand for it."""

    def __init__(self, outbox: Outbox, recorded: Database) -> None:
        self.outbox = outbox
        self.recorded = recorded
        self.runs: list[Any] = []
        app = outbox.app
        self.step = add_task(app, lambda value: self.note(value), name="shop.step")
        self.total = add_task(app, lambda values: self.note(sum(values)), name="shop.total")
        self.last = add_task(app, lambda value: self.note(value + 100), name="shop.last")

    def note(self, value: Any) -> Any:
        self.runs.append(value)
        return value

    def replaced_by(self, make: Any, **options: Any) -> Any:
        """Return a task that is replaced by what ``make`` makes."""
        body = lambda self, *args: self.replace(make())  # noqa: E731 (the app names it)
        return add_task(self.outbox.app, body, name="shop.replaced", bind=True, **options)

    def waiting(self, *, but: str = "") -> list[tuple[str, str]]:
        """Return ids and tasks of the jobs that no worker has taken."""
        job = self.recorded.tables.job
        with self.recorded.engine.connect() as connection:
            rows = connection.execute(job.select().where(job.c.state == "queued"))
            return [(row.id, row.task) for row in rows if row.id != but]

    def run(self) -> None:
        """Deliver until nothing waits."""
        while found := self.waiting():
            for job_id, task in found:
                deliver(self.outbox.app.tasks[task], job_id)


@pytest.fixture
def shop(outbox: Outbox, recorded: Database) -> Shop:
    return Shop(outbox, recorded)


CANVASES: dict[str, Any] = {
    "chain": lambda shop: chain(shop.step.s(1), shop.step.s(), shop.last.s()),
    "chord": lambda shop: chord([shop.step.s(1), shop.step.s(2)], shop.total.s()),
    "group": lambda shop: group(shop.step.s(1), shop.step.s(2)),
    "chain of chord": lambda shop: chain(shop.step.s(1), group(shop.step.s()), shop.last.s()),
}


@pytest.mark.parametrize("canvas", CANVASES)
@pytest.mark.parametrize("transactional", [False, True])
def test_the_job_is_replaced_until_the_last_step_ends_it(shop, canvas, transactional):
    task = shop.replaced_by(lambda: CANVASES[canvas](shop), transactional=transactional)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    assert shop.recorded.job("job-1").state is State.REPLACED
    assert shop.recorded.messages("job-1") == []
    again(task, "job-1")
    assert shop.recorded.job("job-1").state is State.REPLACED
    shop.run()
    job = shop.recorded.job("job-1")
    assert (job.state, job.task != "shop.replaced", job.attempt) == (State.SUCCEEDED, True, 2)
    events = [each for each in shop.recorded.events("job-1") if each != "duplicate"]
    assert events == ["recorded", "claimed", "replaced", "continued", "claimed", "succeeded"]


def test_what_follows_the_replaced_job_follows_the_last_step(shop):
    task = shop.replaced_by(lambda: chain(shop.step.s(1), shop.step.s()))
    chain(task.s().set(task_id="job-1"), shop.last.s().set(task_id="job-2")).delay()
    deliver(task, "job-1")
    shop.run()
    assert shop.runs == [1, 1, 101]
    assert shop.recorded.job("job-2").state is State.SUCCEEDED


def test_a_replaced_member_of_a_chord_counts_when_its_last_step_has_ended(shop):
    task = shop.replaced_by(lambda: chain(shop.step.s(1), shop.step.s()))
    chord([task.s().set(task_id="job-1"), shop.step.s(5)])(shop.total.s().set(task_id="body"))
    deliver(task, "job-1")
    shop.run()
    assert shop.recorded.job("body").state is State.SUCCEEDED
    assert shop.runs[-1] == 6


def test_a_duplicate_of_the_step_before_does_not_run_the_last_one_again(shop):
    task = shop.replaced_by(lambda: chain(shop.step.s(1), shop.last.s()))
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    [(first, _)] = shop.waiting()
    deliver(shop.step, first)
    again(shop.step, first)
    shop.run()
    again(shop.step, first)
    shop.run()
    assert shop.runs == [1, 101]


def test_a_step_that_is_replaced_itself_does_not_go_on_as_a_duplicate_of_itself(shop):
    inner = add_task(
        shop.outbox.app,
        lambda self, value: self.replace(chain(shop.step.s(value), shop.last.s())),
        name="shop.inner",
        bind=True,
    )
    task = shop.replaced_by(lambda: chain(shop.step.s(1), inner.s()))
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    [(first, _)] = shop.waiting()
    deliver(shop.step, first)
    deliver(inner, "job-1")
    assert shop.recorded.job("job-1").state is State.REPLACED
    # The step before comes again, and sends the replaced step again.
    again(shop.step, first)
    assert shop.recorded.job("job-1").state is State.REPLACED
    shop.run()
    assert shop.recorded.job("job-1").state is State.SUCCEEDED
    assert shop.runs == [1, 1, 101]


def test_a_replacement_that_cannot_be_recorded_leaves_nothing_behind(shop):
    task = shop.replaced_by(lambda: group(shop.step.s(1), shop.step.s(object())))
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = shop.recorded.job("job-1")
    assert (job.state, shop.recorded.counts()[0]) == (State.QUARANTINED, 1)


def test_an_attempt_that_has_lost_its_lease_is_replaced_by_nothing(shop):
    def lose() -> Any:
        shop.recorded.end_lease("job-1")
        shop.recorded.do(transitions.claim, shop.recorded.job("job-1"), actor="other", lease=60)
        return chain(shop.step.s(1), shop.step.s())

    task = shop.replaced_by(lose)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = shop.recorded.job("job-1")
    assert (job.state, job.leased_by, shop.recorded.counts()[0]) == (State.RUNNING, "other", 1)


def test_a_replaced_job_can_be_cancelled_and_its_last_step_is_not_run(shop):
    task = shop.replaced_by(lambda: chain(shop.step.s(1), shop.last.s()))
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    shop.outbox.control.cancel("job-1")
    [(first, _)] = shop.waiting()
    assert deliver(shop.step, first) == "SUCCESS"
    assert shop.recorded.job("job-1").state is State.CANCELLED
    assert shop.runs == [1]


def test_a_quarantined_step_that_is_replayed_leads_to_the_end_after_all(shop):
    task = shop.replaced_by(lambda: chain(shop.step.s(1, 2), shop.last.s()))
    shop.step.__header__ = None
    shop.step.typing = False
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    [(first, _)] = shop.waiting()
    deliver(shop.step, first)
    assert shop.recorded.job(first).state is State.QUARANTINED
    assert shop.recorded.job("job-1").state is State.REPLACED
    shop.step.run = lambda *values: shop.note(values[0])
    shop.outbox.control.replay(first)
    shop.run()
    assert shop.recorded.job("job-1").state is State.SUCCEEDED


@pytest.mark.parametrize("canvas", ["task", "chain"])
def test_a_replacement_begins_as_a_job_of_its_own_does(shop, canvas):
    seen = []

    def show(self):
        seen.append((self.request.retries, self.request.delivery_info["redelivered"]))
        if len(seen) < 5:
            raise ConnectionError

    end = add_task(shop.outbox.app, show, name="shop.shown", bind=True, max_attempts=3)
    task = shop.replaced_by(
        lambda: end.s() if canvas == "task" else chain(shop.step.s(1), end.si())
    )
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    shop.run()
    for _ in range(3):
        shop.recorded.make_due("job-1")
        deliver(end, "job-1")
    # All of its three attempts, and none of what it stands for.
    assert seen == [(0, False), (1, True), (2, True)]
    job = shop.recorded.job("job-1")
    assert (job.state, job.attempt, job.max_attempts) == (State.QUARANTINED, 4, 4)


def test_a_replacement_has_all_the_retries_that_it_asks_for(shop):
    seen = []

    def flaky(self):
        seen.append(self.request.retries)
        raise self.retry(countdown=0, max_retries=2)

    end = add_task(shop.outbox.app, flaky, name="shop.flaky", bind=True)
    task = shop.replaced_by(end.s)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    for _ in range(4):
        shop.recorded.make_due("job-1")
        deliver(end, "job-1")
    assert seen == [0, 1, 2]
    assert shop.recorded.job("job-1").reason == "attempts_exhausted"


def test_a_replacement_that_fails_waits_as_after_a_first_attempt(shop):
    policy = RetryPolicy(delay=100, factor=3, jitter=0)
    fail = raising(ConnectionError())
    end = add_task(shop.outbox.app, fail, name="shop.failing", retry_policy=policy)
    task = shop.replaced_by(end.s)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    deliver(end, "job-1")
    job = shop.recorded.job("job-1")
    assert (job.state, job.attempt) == (State.RETRYING, 2)
    assert 90 < (job.available_at - job.now).total_seconds() <= 100


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("taken", ["export-42", "6b1e9c52-2a63-4c0e-8a5c-0f6f2f7a9d11"])
def test_a_replacement_whose_id_is_another_jobs_leaves_nothing_behind(shop, taken, transactional):
    shop.step.apply_async((1,), task_id=taken)
    make = lambda: chain(shop.last.s(1).set(task_id=taken), shop.step.s())  # noqa: E731
    task = shop.replaced_by(make, transactional=transactional)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = shop.recorded.job("job-1")
    assert (job.state, job.error_code) == (State.QUARANTINED, "celery_outbox.exceptions.JobIdTaken")
    assert shop.recorded.counts()[0] == 2
