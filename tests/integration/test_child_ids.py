"""An attempt that runs again does not enqueue a second time what an earlier one enqueued."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Task, chain, chord, group, signals, signature
from sqlalchemy import delete, select

from celery_outbox import Outbox
from celery_outbox.core.child_id import child_id, fingerprint
from celery_outbox.core.states import State
from celery_outbox.exceptions import ConfigurationError
from celery_outbox.store import job as jobs
from celery_outbox.store import transitions
from tests.factories import Database
from tests.integration.delivering import add_task, again, deliver, raising


def children(recorded: Database, parent: str) -> list[tuple[str, list]]:
    """Return the task and arguments of each job beside the parent, sorted."""
    job = recorded.tables.job
    with recorded.engine.connect() as connection:
        rows = connection.execute(select(job.c.task, job.c.body).where(job.c.id != parent))
        found = [(task, json.loads(body)[0]) for task, body in rows]
        return sorted(found, key=json.dumps)


def run_again(recorded: Database, task: Task, job_id: str) -> str:
    """Deliver the next attempt of a job that is being retried, when it is due."""
    recorded.make_due(job_id)
    return deliver(task, job_id)


@contextmanager
def connected(signal: Any, receiver: Callable[..., None]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


class Parent:
    """A task whose body makes the calls of one attempt after the other; all but the last fail."""

    def __init__(self, outbox, *attempts, **options) -> None:
        self.child = add_task(outbox.app, **{"name": "shop.child", **options.pop("child", {})})
        self.attempts = list(attempts)
        body = self.body
        options = {"name": "shop.parent", "bind": True, **options}
        self.task = add_task(outbox.app, lambda task: body(task), **options)
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


CANVASES = {
    "group": lambda child: group(child.s(1), child.s(2)),
    "list": lambda child: group([child.s(number) for number in range(5)]),
    "chain": lambda child: chain(child.si(1), child.si(2)),
    "chord": lambda child: chord([child.s(1), child.s(2)], child.si(3)),
    "chain of groups": lambda child: chain(
        child.si(1), group(child.si(2), child.si(3)), child.si(4)
    ),
    "group of chains": lambda child: group(
        chain(child.si(1), child.si(2)), chord([child.si(3), child.si(4)], child.si(5))
    ),
}


@pytest.mark.parametrize("canvas", CANVASES)
def test_a_canvas_is_enqueued_once_and_runs_to_its_end_once(outbox, recorded, canvas):
    def call(child):
        CANVASES[canvas](child).apply_async()
        # An equal one is another one.
        CANVASES[canvas](child).delay()

    once = Parent(outbox, call, child={"name": "shop.once"})
    again = Parent(outbox, call, call, call, name="shop.again")
    assert deliver(once.task, once.job_id) == "SUCCESS"
    again.run(recorded)
    job = recorded.tables.job

    def waiting() -> list[tuple[str, str]]:
        wanted = select(job.c.id, job.c.task).where(
            job.c.state == "queued", job.c.task.in_(["shop.once", "shop.child"])
        )
        with recorded.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(wanted)]

    ran = Counter()
    while found := waiting():
        for job_id, task in found:
            assert deliver(outbox.app.tasks[task], job_id) == "SUCCESS"
            ran[task] += 1
    assert ran["shop.child"] == ran["shop.once"] > 3


def test_a_chord_that_has_ended_since_is_not_enqueued_again(outbox, recorded):
    call = lambda child: chord([child.s(1), child.s(2)], child.si(3)).delay()  # noqa: E731
    parent = Parent(outbox, call, call)
    assert deliver(parent.task, parent.job_id) == "RETRY"
    for count in (2, 1):
        found = recorded.do(jobs.find, states=frozenset({State.QUEUED}))
        assert len(found) == count
        for job in found:
            assert deliver(parent.child, job.id) == "SUCCESS"
    assert run_again(recorded, parent.task, parent.job_id) == "SUCCESS"
    assert recorded.do(jobs.find, states=frozenset({State.QUEUED})) == []
    assert len(children(recorded, parent.job_id)) == 3


def test_another_canvas_is_never_absorbed(outbox, recorded):
    def otherwise(child):
        group(child.s(1), child.s(3)).delay()
        group(child.s(2), child.s(1)).delay()
        group(child.s(1), child.s(2)).delay()

    parent = Parent(outbox, lambda child: group(child.s(1), child.s(2)).delay(), otherwise)
    assert len(parent.run(recorded)) == 6


def test_a_canvas_that_was_recorded_in_part_is_completed(outbox, recorded):
    grouped = lambda child: group([child.s(number) for number in range(4)]).delay()  # noqa: E731
    parent = Parent(outbox, grouped, grouped)
    assert deliver(parent.task, parent.job_id) == "RETRY"
    job, message = recorded.tables.job, recorded.tables.message
    found = [row.id for row in recorded.do(jobs.find, limit=9)]
    missing = next(job_id for job_id in found if job_id != parent.job_id)
    recorded.execute(delete(message).where(message.c.job_id == missing))
    recorded.execute(delete(job).where(job.c.id == missing))
    assert run_again(recorded, parent.task, parent.job_id) == "SUCCESS"
    assert recorded.job(missing).state is State.QUEUED
    assert [args for _, args in children(recorded, parent.job_id)] == [[0], [1], [2], [3]]


def test_what_a_receiver_calls_while_a_canvas_is_sent_takes_none_of_its_ids(outbox, recorded):
    seen = []

    def receiver(headers=None, **kwargs):
        if failing:
            seen.append(signature("shop.child", (9,), app=outbox.app).freeze().id)

    def grouped(child):
        group(child.s(1), child.s(2)).delay()

    failing = False
    # Before the first call, for which Celery 5.4 looks once who the receivers are.
    with connected(signals.before_task_publish, receiver):
        parent = Parent(outbox, grouped, grouped)
        failing = True
        assert deliver(parent.task, parent.job_id) == "RETRY"
        failing = False
        assert run_again(recorded, parent.task, parent.job_id) == "SUCCESS"
    assert len(seen) == 2
    assert len(children(recorded, parent.job_id)) == 2


def test_a_group_out_of_a_generator_has_celerys_own_ids(outbox, recorded):
    def grouped(child):
        group(child.s(number) for number in (1, 2)).delay()

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


def test_a_hook_enqueues_again_for_an_attempt_after_a_replay(outbox, recorded):
    alert = add_task(outbox.app, name="shop.alert")

    def on_failure(self, *args):
        alert.delay()

    base = type("Alerting", (type(alert).__mro__[1],), {"abstract": True, "on_failure": on_failure})
    task = add_task(outbox.app, raising(ValueError("1"), ValueError("2")), base=base)
    job_id = task.delay().id
    deliver(task, job_id)
    outbox.control.replay(job_id)
    deliver(task, job_id)
    assert len(children(recorded, job_id)) == 2


def rounds(recorded: Database, outbox: Outbox, job_id: str) -> list[list]:
    """Deliver a job until it has ended; returns the arguments of its children."""
    while recorded.job(job_id).state in (State.QUEUED, State.RETRYING):
        run_again(recorded, outbox.app.tasks[recorded.job(job_id).task], job_id)
    assert recorded.job(job_id).state is State.SUCCEEDED
    return [args for _, args in children(recorded, job_id)]


def test_each_round_of_a_poll_loop_enqueues_anew(outbox, recorded):
    child = add_task(outbox.app, name="shop.child")

    def poll(self):
        child.delay("tick")
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    task = add_task(outbox.app, poll, bind=True)
    # Delivered where an error is being handled, which is none of the body's.
    try:
        raise OSError
    except OSError:
        assert rounds(recorded, outbox, task.delay().id) == [["tick"]] * 3


@pytest.mark.parametrize("way", ["exc", "positional exc", "except", "finally", "autoretry_for"])
def test_a_retry_because_of_an_error_enqueues_nothing_anew(outbox, recorded, way):
    child = add_task(outbox.app, name="shop.child")

    def body(self):
        child.delay("tick")
        if self.request.retries == 2:
            return
        if way == "exc":
            raise self.retry(exc=OSError(), countdown=0)
        if way == "positional exc":
            raise self.retry(None, None, OSError(), countdown=0)
        try:
            raise OSError
        except OSError:
            if way == "except":
                raise self.retry(countdown=0) from None
            raise
        finally:
            if way == "finally":
                self.retry(countdown=0)

    options = {"autoretry_for": (OSError,)} if way == "autoretry_for" else {}
    task = add_task(outbox.app, body, bind=True, name="shop.polling", **options)
    assert rounds(recorded, outbox, task.delay().id) == [["tick"]]


def test_a_round_that_fails_or_is_lost_enqueues_nothing_anew(outbox, recorded):
    child = add_task(outbox.app, name="shop.child")
    ends = iter(["next", "error", "lost", "next", None])

    def poll(self):
        child.delay("tick")
        end = next(ends)
        if end == "next":
            raise self.retry(countdown=0)
        if end == "error":
            raise ConnectionError
        if end == "lost":
            recorded.end_lease(job_id)
            recorded.do(transitions.rescue, recorded.job(job_id), actor="maintenance", delay=0.0)

    task = add_task(outbox.app, poll, bind=True, max_retries=None)
    job_id = task.delay().id
    # Three rounds: the second one has three attempts.
    assert rounds(recorded, outbox, job_id) == [["tick"]] * 3
    assert recorded.job(job_id).attempt == 5


def test_a_job_that_is_replaced_by_itself_or_another_enqueues_anew(outbox, recorded):
    child = add_task(outbox.app, name="shop.child")
    tasks = {}

    def body(self, number):
        child.delay("tick")
        if number:
            raise self.replace(tasks["next"].s(number - 1))

    tasks["first"] = add_task(outbox.app, body, name="shop.first", bind=True)
    tasks["next"] = add_task(outbox.app, body, name="shop.next", bind=True)
    assert rounds(recorded, outbox, tasks["first"].delay(2).id) == [["tick"]] * 3
    assert rounds(recorded, outbox, tasks["next"].delay(2).id)[:3] == [["tick"]] * 3


@pytest.mark.parametrize("canvas", ["chain", "chord", "group"])
def test_the_last_step_of_a_replacement_enqueues_anew(outbox, recorded, canvas):
    child = add_task(outbox.app, name="shop.child")
    between = add_task(outbox.app, lambda *args: 1, name="shop.between")

    def last(self, *args):
        child.delay("tick")
        if self.request.retries < 1:
            raise ConnectionError

    end = add_task(outbox.app, last, name="shop.end", bind=True)

    def body(self):
        child.delay("tick")
        first = (
            chord([between.si()], end.si()) if canvas == "chord" else chain(between.si(), end.si())
        )
        if canvas == "group":
            first = chain(group(between.si(), between.si()), end.si())
        raise self.replace(first)

    task = add_task(outbox.app, body, bind=True)
    job_id = task.delay().id
    deliver(task, job_id)
    job = recorded.tables.job
    with recorded.engine.connect() as connection:
        waiting = select(job.c.id).where(job.c.task == "shop.between")
        steps = connection.execute(waiting).scalars().all()
    for step in steps:
        assert deliver(between, step) == "SUCCESS"
    assert rounds(recorded, outbox, job_id).count(["tick"]) == 2
    assert recorded.job(job_id).attempt == 3


def test_arguments_that_cannot_be_serialized_are_explained_as_ever(outbox, recorded):
    parent = Parent(outbox, lambda child: child.delay(object()))
    assert deliver(parent.task, parent.job_id) == "FAILURE"
    code = recorded.job(parent.job_id).error_code
    assert code == "celery_outbox.exceptions.UnserializableArgument"


def test_ids_differ_by_parent_phase_call_and_ordinal():
    call, other = fingerprint("t", b"1", b"23"), fingerprint("t", b"12", b"3")
    ids = {
        child_id("a", "part 0", call, 0),
        child_id("b", "part 0", call, 0),
        child_id("a", "part 1", call, 0),
        child_id("a", "after 1", call, 0),
        child_id("a", "part 0", other, 0),
        child_id("a", "part 0", call, 1),
    }
    assert len(ids) == 6
    assert child_id("a", "part 0", call, 0) in ids
