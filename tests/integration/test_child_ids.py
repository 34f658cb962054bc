"""An attempt that runs again does not enqueue a second time what an earlier one enqueued."""

from __future__ import annotations

import json

import pytest
from celery import Task, group, signature
from sqlalchemy import select, update

from celery_outbox.core.child_id import child_id, fingerprint
from celery_outbox.core.states import State
from celery_outbox.exceptions import ConfigurationError
from tests.factories import Database
from tests.integration.delivering import add_task, again, deliver


def children(recorded: Database, parent: str) -> list[tuple[str, list]]:
    """Return the task and arguments of each job beside the parent, sorted."""
    job = recorded.tables.job
    with recorded.engine.connect() as connection:
        rows = connection.execute(select(job.c.task, job.c.body).where(job.c.id != parent))
        found = [(task, json.loads(body)[0]) for task, body in rows]
        return sorted(found, key=json.dumps)


def run_again(recorded: Database, task: Task, job_id: str) -> str:
    """Deliver the next attempt of a job that is being retried, when it is due."""
    job = recorded.tables.job
    recorded.execute(
        update(job).where(job.c.id == job_id).values(available_at=recorded.job(job_id).recorded_at)
    )
    return deliver(task, job_id)


class Parent:
    """A task whose body makes the calls of one attempt after the other; all but the last fail."""

    def __init__(self, outbox, *attempts, **options) -> None:
        self.child = add_task(outbox.app, name="shop.child", **options.pop("child", {}))
        self.attempts = list(attempts)
        body = self.body
        self.task = add_task(
            outbox.app, lambda task: body(task), name="shop.parent", bind=True, **options
        )
        self.job_id = self.task.delay().id

    def body(self, task):
        calls = self.attempts.pop(0)
        calls(self.child)
        if self.attempts:
            raise ConnectionError

    def run(self, recorded):
        attempts = len(self.attempts)
        assert deliver(self.task, self.job_id) == ("RETRY" if attempts > 1 else "SUCCESS")
        for number in range(1, attempts):
            expected = "SUCCESS" if number == attempts - 1 else "RETRY"
            assert run_again(recorded, self.task, self.job_id) == expected
        return children(recorded, self.job_id)


def two(child):
    child.delay(1)
    child.delay(2)


def test_what_an_attempt_enqueued_is_not_enqueued_again_by_the_next(outbox, recorded):
    parent = Parent(outbox, two, two, two)
    assert parent.run(recorded) == [("shop.child", [1]), ("shop.child", [2])]
    assert recorded.job(parent.job_id).attempt == 3


def test_equal_calls_of_one_attempt_are_as_many_jobs(outbox, recorded):
    def equal(child):
        for _ in range(3):
            child.delay(1)

    assert Parent(outbox, equal, equal).run(recorded) == [("shop.child", [1])] * 3


def test_an_attempt_that_came_further_enqueues_the_rest(outbox, recorded):
    parent = Parent(outbox, lambda child: child.delay(1), two)
    assert parent.run(recorded) == [("shop.child", [1]), ("shop.child", [2])]


def test_another_order_changes_nothing(outbox, recorded):
    def turned(child):
        child.delay(2)
        child.delay(1)

    assert Parent(outbox, two, turned).run(recorded) == [("shop.child", [1]), ("shop.child", [2])]


def test_another_call_is_never_absorbed(outbox, recorded):
    def linked(child):
        child.apply_async((1,), link=child.s(5))

    def otherwise(child):
        child.apply_async((1,), {"x": 2})
        child.apply_async(("1",))
        child.apply_async((1.0,))
        child.apply_async((True,))
        linked(child)

    parent = Parent(outbox, lambda child: child.delay(1), otherwise)
    assert len(parent.run(recorded)) == 6


def test_the_same_call_at_another_time_or_to_another_queue_is_the_same(outbox, recorded):
    parent = Parent(
        outbox,
        lambda child: child.apply_async((1,), countdown=5, expires=100),
        lambda child: child.apply_async((1,), countdown=60, queue="other", priority=3),
    )
    assert parent.run(recorded) == [("shop.child", [1])]


def test_a_task_may_enqueue_anew_in_each_attempt(outbox, recorded):
    parent = Parent(outbox, two, two, derive_child_ids=False)
    assert len(parent.run(recorded)) == 4
    with pytest.raises(ConfigurationError, match="derive_child_ids"):
        add_task(outbox.app, name="shop.wrong", derive_child_ids="no")


def test_an_id_of_the_callers_own_stays_as_it_is(outbox, recorded):
    def own(child):
        child.apply_async((1,), task_id="mine")

    assert Parent(outbox, own, own).run(recorded) == [("shop.child", [1])]
    assert recorded.job("mine").task == "shop.child"


def test_two_jobs_that_make_the_same_call_enqueue_two(outbox, recorded):
    child = add_task(outbox.app, name="shop.child")
    task = add_task(outbox.app, lambda: child.delay(1), ignore_result=True)
    for _ in range(2):
        assert deliver(task, task.delay().id) == "SUCCESS"
    assert recorded.counts()[0] == 4


def test_what_was_rolled_back_with_a_transactional_body_is_recorded_by_the_next(outbox, recorded):
    parent = Parent(outbox, two, two, transactional=True)
    assert deliver(parent.task, parent.job_id) == "RETRY"
    assert children(recorded, parent.job_id) == []
    assert run_again(recorded, parent.task, parent.job_id) == "SUCCESS"
    assert len(children(recorded, parent.job_id)) == 2


def test_calls_by_name_and_signatures_are_recognized_too(outbox, recorded):
    def by_name(child):
        child.app.send_task("billing.invoice", (1,))
        signature("billing.invoice", (2,), app=child.app).delay()
        child.s(3).delay()

    found = Parent(outbox, by_name, by_name).run(recorded)
    assert found == [("billing.invoice", [1]), ("billing.invoice", [2]), ("shop.child", [3])]


def test_a_group_has_celerys_own_ids_and_is_enqueued_by_each_attempt(outbox, recorded):
    def grouped(child):
        group(child.s(1), child.s(2)).delay()

    assert len(Parent(outbox, grouped, grouped).run(recorded)) == 4


def test_a_group_whose_tasks_have_ids_is_enqueued_once(outbox, recorded):
    def grouped(child):
        group(child.s(3).set(task_id="three"), child.s(4).set(task_id="four")).delay()

    assert len(Parent(outbox, grouped, grouped).run(recorded)) == 2


def test_a_hook_enqueues_once_for_each_attempt_and_not_again_for_a_duplicate(outbox, recorded):
    alert = add_task(outbox.app, name="shop.alert")

    class Alerting(type(alert).__mro__[1]):
        abstract = True

        def on_retry(self, *args):
            alert.delay("retry")

        def on_success(self, *args):
            alert.delay("done")

    def body(self):
        alert.delay("done")
        if self.request.retries < 2:
            raise ConnectionError

    task = add_task(outbox.app, body, base=Alerting, bind=True)
    job_id = task.delay().id
    assert deliver(task, job_id) == "RETRY"
    assert run_again(recorded, task, job_id) == "RETRY"
    assert run_again(recorded, task, job_id) == "SUCCESS"
    expected = [["done"], ["done"], ["retry"], ["retry"]]
    assert [args for _, args in children(recorded, job_id)] == expected
    assert again(task, job_id) == "SUCCESS"
    assert [args for _, args in children(recorded, job_id)] == expected


def test_a_replayed_job_does_not_enqueue_again(outbox, recorded):
    def calls(child):
        child.delay(1)
        if len(parent.attempts) == 1:
            raise ValueError

    parent = Parent(outbox, calls, calls)
    deliver(parent.task, parent.job_id)
    assert recorded.job(parent.job_id).state is State.QUARANTINED
    outbox.control.replay(parent.job_id)
    assert deliver(parent.task, parent.job_id) == "SUCCESS"
    assert children(recorded, parent.job_id) == [("shop.child", [1])]


def test_arguments_that_cannot_be_serialized_are_explained_as_ever(outbox, recorded):
    parent = Parent(outbox, lambda child: child.delay(object()))
    assert deliver(parent.task, parent.job_id) == "FAILURE"
    code = recorded.job(parent.job_id).error_code
    assert code == "celery_outbox.exceptions.UnserializableArgument"


def test_ids_differ_by_parent_phase_call_and_ordinal():
    call, other = fingerprint("t", b"1", b"23"), fingerprint("t", b"12", b"3")
    ids = {
        child_id("a", "body", call, 0),
        child_id("b", "body", call, 0),
        child_id("a", "after 1", call, 0),
        child_id("a", "body", other, 0),
        child_id("a", "body", call, 1),
    }
    assert len(ids) == 5
    assert child_id("a", "body", call, 0) in ids
