"""The guard around Celery's tracer, in this process: what each way to end a body leaves behind."""

from __future__ import annotations

import json
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg2
import pytest
from celery import Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, WorkerTerminate
from greenlet import GreenletExit
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from celery_outbox import FileStore, Outbox, PermanentError, RetryPolicy
from celery_outbox.execute import celery_versions
from celery_outbox.execute import guard as guarding
from celery_outbox.execute.claim import Claim
from celery_outbox.store import job as jobs
from celery_outbox.store import transitions
from tests.factories import Database, make_stock_app, open_outbox
from tests.integration.delivering import add_task, again, deliver, deliver_stock, outcome, raising

#: What Celery says when its own part of a delivery fails, as some of these tests make it.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

AT_ONCE = RetryPolicy(3, delay=0.0)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that the guard would have made."""
    seen: list[float] = []
    monkeypatch.setattr(guarding, "pause", seen.append)
    return seen


@pytest.fixture
def outbox(outbox: Outbox) -> Outbox:
    """An outbox whose results of Celery's own are kept in memory."""
    outbox.app.conf.result_backend = "cache+memory://"
    return outbox


def test_the_body_gets_its_arguments_and_the_result_is_stored(outbox: Outbox, recorded: Database):
    task = add_task(outbox.app, lambda x, y: x + y)
    task.apply_async((1,), {"y": 2}, task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, job.attempt, json.loads(job.result)) == ("succeeded", 1, 3)


def test_a_duplicate_gets_the_stored_result_and_runs_nothing(outbox: Outbox, recorded: Database):
    runs: list[int] = []
    task = add_task(outbox.app, lambda: runs.append(1) or "first")
    task.apply_async(task_id="twice-1")
    deliver(task, "twice-1")
    assert deliver(task, "twice-1") == "SUCCESS"
    assert (runs, recorded.job("twice-1").deliveries) == ([1], 2)
    assert outbox.app.AsyncResult("twice-1").get() == "first"


@pytest.mark.parametrize("links", [1, 2, 3])
def test_callbacks_that_are_sent_again_are_absorbed(outbox, recorded, links):
    task = add_task(outbox.app)
    task.apply_async(task_id="job-1", link=[task.si(number) for number in range(links)])
    deliver(task, "job-1")
    assert recorded.counts()[0] == 1 + links
    deliver(task, "job-1")
    assert recorded.counts()[0] == 1 + links


def test_the_next_step_of_a_chain_that_is_sent_again_is_absorbed(outbox, recorded):
    task = add_task(outbox.app)
    result = (task.si(1) | task.si(2)).apply_async()
    deliver(task, result.parent.id)
    assert recorded.job(result.id).state == "queued"
    deliver(task, result.parent.id)
    assert recorded.counts()[0] == 2


def test_calls_in_hooks_of_a_failing_attempt_are_not_taken_for_duplicates(outbox, recorded):
    alert = add_task(outbox.app, name="shop.alert")
    task = add_task(
        outbox.app,
        raising(OSError(), OSError(), OSError()),
        retry_policy=AT_ONCE,
        on_retry=lambda self, *args: alert.delay(),
        after_return=lambda self, *args: None,
    )
    task.apply_async(task_id="job-1")
    for _ in range(3):
        deliver(task, "job-1")
    alerts = [job for job in outbox.control.find() if job.task == "shop.alert"]
    assert len(alerts) == 2


def test_a_callback_that_cannot_be_sent_is_sent_with_the_next_delivery(
    outbox, recorded, monkeypatch, pauses
):
    task = add_task(outbox.app)
    task.apply_async(task_id="job-1", link=task.si(1))
    record = outbox._recorder._record
    monkeypatch.setattr(outbox._recorder, "_record", raising(RuntimeError("blip")))
    assert deliver(task, "job-1") == "REJECTED"
    assert pauses
    monkeypatch.setattr(outbox._recorder, "_record", record)
    assert again(task, "job-1") == "SUCCESS"
    assert recorded.counts()[0] == 2


def break_backend(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Celery's result backend fail as one does that is away."""
    away = raising(*(ConnectionError("the result backend is away") for _ in range(9)))
    monkeypatch.setattr(task.backend, "store_result", away)


@pytest.mark.parametrize(
    ("error", "first", "second", "state"),
    [
        # Once more, so that the result may be reported after all; then the job's row is enough.
        (None, "REJECTED", "IGNORED", "succeeded"),
        (OSError("x"), "IGNORED", "IGNORED", "retrying"),
        # Rejected for good; a copy for the quarantine queue is in the outbox by then.
        (ValueError("x"), "REJECTED", "IGNORED", "quarantined"),
    ],
    ids=["success", "retry", "failure"],
)
def test_a_result_backend_that_is_away_does_not_change_how_an_attempt_ended(
    outbox, recorded, monkeypatch, error, first, second, state
):
    runs = []
    body = raising(*([error] if error else []))
    task = add_task(outbox.app, lambda: runs.append(1) or body(), retry_policy=RetryPolicy(3, 60))
    task.apply_async(task_id="job-1")
    break_backend(task, monkeypatch)
    assert deliver(task, "job-1") == first
    assert (recorded.job("job-1").state, recorded.job("job-1").reason) == (
        state,
        "permanent" if state == "quarantined" else None,
    )
    if state != "retrying":
        assert again(task, "job-1") == second
    assert (recorded.job("job-1").attempt, runs) == (1, [1])


def test_a_start_that_cannot_be_reported_is_an_attempt_that_failed(outbox, recorded, monkeypatch):
    task = add_task(outbox.app, track_started=True)
    task.apply_async(task_id="job-1")
    break_backend(task, monkeypatch)
    assert deliver(task, "job-1") == "RETRY"
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.error_code) == ("retrying", 1, "ConnectionError")


@pytest.mark.parametrize(
    ("error", "state", "reason", "seen"),
    [
        (PermanentError("x"), "quarantined", "permanent", "FAILURE"),
        (ValueError("x"), "quarantined", "permanent", "FAILURE"),
        (OSError("x"), "retrying", None, "RETRY"),
        (SoftTimeLimitExceeded(), "retrying", None, "RETRY"),
        (MemoryError("x"), "retrying", None, "RETRY"),
        (Ignore(), "succeeded", None, "IGNORED"),
        (Reject("x", requeue=False), "quarantined", "rejected", "REJECTED"),
        (Reject("x", requeue=True), "retrying", None, "RETRY"),
        (Retry("x", when=5), "retrying", None, "RETRY"),
    ],
)
def test_each_way_to_end_a_body_ends_the_attempt(outbox, recorded, error, state, reason, seen):
    task = add_task(outbox.app, raising(error))
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == seen
    job = recorded.job("job-1")
    assert (job.state, job.reason, job.lease_token, job.leased_by) == (state, reason, 1, None)


def test_a_retry_raised_by_hand_keeps_to_the_limit(outbox, recorded):
    task = add_task(outbox.app, raising(Retry("x", when=0), Retry("x", when=0), Retry("x", when=0)))
    task.apply_async(task_id="job-1")
    for _ in range(3):
        deliver(task, "job-1")
    assert recorded.job("job-1").state == "quarantined"


def test_a_retry_raised_by_hand_comes_back_when_it_said(outbox, recorded):
    when = datetime.now(timezone.utc) + timedelta(hours=1)
    task = add_task(outbox.app, raising(Retry("x", when=when)))
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert abs(recorded.job("job-1").available_at - when) < timedelta(minutes=1)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), CancelledError()])
def test_a_body_that_leaves_the_process_is_counted_and_tried_again(outbox, recorded, error):
    task = add_task(outbox.app, raising(error))
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "RETRY"
    job = recorded.job("job-1")
    assert (job.state, job.attempt) == ("retrying", 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [(SystemExit(1), "SystemExit"), (WorkerTerminate(1), "worker_stopped")],
)
def test_what_must_leave_the_process_is_counted_and_leaves_it(
    outbox, recorded, monkeypatch, error, code
):
    monkeypatch.setattr(celery_versions, "in_pool_process", lambda: True)
    task = add_task(outbox.app, raising(error))
    task.apply_async(task_id="job-1")
    with pytest.raises(type(error)):
        deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.error_code) == ("retrying", 1, code)


def test_a_greenlet_that_is_killed_while_it_claims_gives_the_message_back(
    outbox, recorded, monkeypatch
):
    task = add_task(outbox.app)
    task.apply_async(task_id="job-1")
    with monkeypatch.context() as patch:
        patch.setattr(outbox.guard, "_claim", raising(GreenletExit()))
        assert deliver(task, "job-1") == "REJECTED"
    assert again(task, "job-1") == "SUCCESS"
    assert recorded.job("job-1").attempt == 1


@pytest.mark.parametrize("error", [SystemExit(1), MemoryError(), Reject("x", requeue=True)])
def test_what_a_hook_raises_after_the_success_brings_the_message_back_once(outbox, recorded, error):
    def leave(self, *args):
        raise error

    task = add_task(outbox.app, lambda: "done", on_success=leave)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "REJECTED"
    assert again(task, "job-1") in ("IGNORED", "FAILURE")
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.deliveries) == ("succeeded", 1, 2)


@pytest.mark.parametrize("error", [SystemExit(1), MemoryError()])
def test_what_before_start_raises_is_counted_whatever_it_is(outbox, recorded, error):
    def leave(self, *args):
        raise error

    task = add_task(outbox.app, before_start=leave, max_attempts=1)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "FAILURE"
    assert recorded.job("job-1").state == "quarantined"


def test_self_retry_goes_on_with_what_it_sent(outbox, recorded):
    def body(self, number):
        if number < 3:
            raise self.retry(args=(number + 1,), countdown=0, exc=OSError("x"))
        return number

    task = add_task(outbox.app, body, bind=True, max_retries=10)
    task.apply_async((1,), task_id="job-1")
    for _ in range(3):
        deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, job.attempt, json.loads(job.result)) == ("succeeded", 3, 3)
    assert recorded.counts()[0] == 1


def test_an_error_after_self_retry_does_not_undo_it(outbox, recorded):
    def body(self):
        try:
            self.retry(countdown=0)
        finally:
            raise ValueError("late")

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "RETRY"
    assert recorded.job("job-1").state == "retrying"


def test_replace_goes_on_as_another_task_under_the_same_id(outbox, recorded):
    other = add_task(outbox.app, lambda: "other", name="shop.other")
    task = add_task(outbox.app, lambda self: self.replace(other.si()), bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    assert deliver(other, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, job.task, job.attempt) == ("succeeded", "shop.other", 2)


def test_a_body_may_return_the_result_of_a_call(outbox, recorded):
    other = add_task(outbox.app, name="shop.other")
    task = add_task(outbox.app, lambda: other.apply_async(task_id="job-2"))
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, job.result) == ("succeeded", b'[["job-2", null], null]')


def test_before_start_that_fails_is_retried_like_the_body(outbox, recorded):
    fail = raising(OSError("x"))
    task = add_task(outbox.app, before_start=lambda self, *args: fail(), retry_policy=AT_ONCE)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "RETRY"
    assert recorded.job("job-1").state == "retrying"
    assert deliver(task, "job-1") == "SUCCESS"


def test_before_start_meets_the_real_arguments(outbox):
    seen: list[Any] = []
    task = add_task(outbox.app, before_start=lambda self, *args: seen.append(args))
    task.apply_async((1,), {"y": 2}, task_id="job-1")
    deliver(task, "job-1")
    assert seen == [("job-1", [1], {"y": 2})]


def test_a_soft_limit_in_the_middle_of_the_settle_does_not_undo_it(outbox, recorded, monkeypatch):
    task = add_task(outbox.app, lambda: "done")
    task.apply_async(task_id="job-1")
    settle, calls = outbox.guard.settle, []

    def interrupted(what, write, **options):
        calls.append(what)
        took = settle(what, write, **options)
        if len(calls) == 1:
            raise SoftTimeLimitExceeded
        return took

    monkeypatch.setattr(outbox.guard, "settle", interrupted)
    assert deliver(task, "job-1") == "SUCCESS"
    assert (recorded.job("job-1").state, len(calls)) == ("succeeded", 2)


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded(), ValueError("strange")])
def test_what_interrupts_the_claim_loses_no_job(outbox, recorded, monkeypatch, pauses, error):
    task = add_task(outbox.app)
    task.apply_async(task_id="job-1")
    with monkeypatch.context() as patch:
        patch.setattr(outbox.guard, "_claim", raising(error))
        assert deliver(task, "job-1") == "REJECTED"
    assert pauses
    assert recorded.job("job-1").state == "queued"
    assert again(task, "job-1") == "SUCCESS"


def test_a_database_that_stays_away_puts_the_message_back(outbox, recorded, monkeypatch):
    task = add_task(outbox.app)
    task.apply_async(task_id="job-1")

    def away(*args, **options):
        raise OperationalError("select", {}, OSError("away"))

    monkeypatch.setattr(guarding, "patiently", away)
    assert deliver(task, "job-1") == "REJECTED"
    assert recorded.job("job-1").attempt == 0


def test_a_message_for_another_task_does_not_touch_the_job(outbox, recorded):
    ran: list[str] = []
    add_task(outbox.app, lambda: ran.append("export")).apply_async(task_id="job-1")
    refund = add_task(outbox.app, lambda: ran.append("refund"), name="shop.refund")
    assert deliver(refund, "job-1") == "REJECTED"
    assert (ran, recorded.job("job-1").state) == ([], "queued")
    assert recorded.events("job-1")[-1] == "mismatch"
    [entry] = outbox.control.quarantined()
    assert (entry.id[:8], entry.task, entry.reason) == ("invalid-", "shop.refund", "id_taken")


def test_a_stock_message_for_another_task_is_kept_whole_once_and_runs_when_replayed(
    outbox, recorded
):
    ran: list[Any] = []
    add_task(outbox.app).apply_async(task_id="job-1")
    refund = add_task(outbox.app, lambda *args: ran.append(args), name="shop.refund")
    for _ in range(2):
        assert deliver_stock(refund, "job-1", [42]) == "REJECTED"
    [entry] = outbox.control.quarantined()
    assert recorded.events("job-1").count("mismatch") == 1
    outbox.control.replay(entry.id)
    assert deliver(refund, entry.id) == "SUCCESS"
    assert ran == [(42,)]


def test_a_stock_message_without_a_usable_result_key_keeps_its_arguments(outbox, recorded):
    task = add_task(outbox.app, result_key="r/{0}.csv")
    assert deliver_stock(task, "job-1", ["../../etc"]) == "FAILURE"
    job = recorded.job("job-1")
    assert (job.reason, json.loads(job.body)[0]) == ("undecodable", ["../../etc"])


def test_arguments_that_only_another_accepted_serializer_takes_are_kept(installed_url):
    with open_outbox(
        installed_url,
        init=False,
        accept_content=["json", "pickle"],
        result_backend="cache+memory://",
    ) as outbox:
        task = add_task(outbox.app, lambda values: len(values))
        assert deliver_stock(task, "job-1", [{1, 2}]) == "SUCCESS"


def test_a_stock_message_with_headers_that_json_cannot_hold_runs(outbox, recorded):
    task = add_task(outbox.app)
    odd = {"raw": memoryview(b"\xff"), "table": {b"\xff": (1, {"when": datetime(2026, 1, 1)})}}
    assert deliver_stock(task, "job-1", [], **odd) == "SUCCESS"
    assert recorded.job("job-1").envelope.headers["raw"] == b"\xff"


@pytest.mark.parametrize("job_id", ["x" * 300, "nul\x00"])
def test_a_message_whose_id_cannot_be_stored_is_quarantined_under_another(outbox, job_id):
    task = add_task(outbox.app)
    assert deliver(task, job_id) == "FAILURE"
    [entry] = outbox.control.quarantined()
    assert entry.id.startswith("invalid-")
    assert entry.reason == "undecodable"


def test_an_old_message_of_a_replaced_task_is_dropped(outbox, recorded):
    other = add_task(outbox.app, name="shop.other")
    task = add_task(outbox.app, lambda self: self.replace(other.si()), bind=True)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1", retries=0)
    assert again(task, "job-1") == "IGNORED"
    assert recorded.job("job-1").state == "retrying"


def test_a_classify_hook_that_raises_leaves_the_decision_to_the_defaults(outbox, recorded):
    def classify(error):
        raise RuntimeError("wrong")

    task = add_task(outbox.app, raising(OSError()), classify=classify)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "RETRY"
    assert recorded.job("job-1").state == "retrying"


def test_callbacks_need_no_transaction_of_a_caller(installed_url):
    with open_outbox(
        installed_url, init=False, outbox_require_transaction=True, result_backend="cache+memory://"
    ) as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        task = add_task(outbox.app)
        with outbox.engine.begin() as connection, outbox.use(connection):
            task.apply_async(task_id="job-1", link=task.si(1))
        assert deliver(task, "job-1") == "SUCCESS"
        assert recorded.counts()[0] == 2


def test_a_payload_that_cannot_be_read_is_quarantined(outbox, recorded):
    task = add_task(outbox.app, serializer="pickle")
    task.apply_async(({1, 2},), task_id="job-1")
    assert deliver(task, "job-1") == "FAILURE"
    job = recorded.job("job-1")
    assert (job.state, job.reason, job.attempt) == ("quarantined", "undecodable", 1)


def test_a_result_that_cannot_be_stored_fails_unless_nobody_wants_it(outbox, recorded):
    task = add_task(outbox.app, lambda: object())
    task.apply_async(task_id="wanted")
    task.apply_async(task_id="ignored", ignore_result=True)
    assert deliver(task, "wanted") == "FAILURE"
    assert recorded.job("wanted").error_code == "kombu.exceptions.EncodeError"
    assert deliver(task, "ignored") == "SUCCESS"
    assert recorded.job("ignored").state == "succeeded"


def test_a_result_that_exists_is_adopted_without_running_the_body(outbox, recorded, tmp_path):
    ran: list[int] = []
    outbox._result_store = FileStore(tmp_path)
    task = add_task(outbox.app, lambda: ran.append(1), result_key="r/{job_id}.csv")
    task.apply_async(task_id="job-1")
    outbox.result_store.write("r/job-1.csv", b"x")
    assert deliver(task, "job-1") == "SUCCESS"
    assert (ran, json.loads(recorded.job("job-1").result)) == ([], "r/job-1.csv")


def test_success_is_not_recorded_without_the_result(outbox, recorded, tmp_path):
    outbox._result_store = FileStore(tmp_path)
    task = add_task(outbox.app, lambda: "I say so", result_key="r/{job_id}.csv")
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "FAILURE"
    job = recorded.job("job-1")
    assert (job.state, job.error_code) == ("quarantined", "celery_outbox.exceptions.ResultMissing")


def test_a_late_settle_changes_nothing(outbox, recorded):
    task = add_task(outbox.app, lambda: recorded.end_lease("job-1") or take_over())

    def take_over() -> str:
        recorded.do(lambda c, t: steal(c, t))
        return "stale"

    def steal(connection, tables):
        job = jobs.lock(connection, tables, "job-1")
        assert transitions.claim(connection, tables, job, actor="other", lease=60.0)

    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    job = recorded.job("job-1")
    assert (job.state, job.leased_by, job.result) == ("running", "other", None)
    assert recorded.events("job-1")[-1] == "stale"


def _retry_later(task: Task) -> None:
    raise task.retry(countdown=0)


def _fail(error: type[Exception]) -> Callable[[Task], None]:
    def fail(task: Task) -> None:
        raise error("late")

    return fail


def _return(task: Task) -> str:
    return "done"


# Nowhere else does a claim go before the disk has it.
@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize(
    "end",
    [_return, _fail(ValueError), _fail(PermanentError), _retry_later],
    ids=["returns", "fails", "fails for good", "retries"],
)
def test_an_attempt_whose_claim_was_forgotten_ends_nothing_and_asks_for_its_message_again(
    outbox, recorded, end, transactional
):
    runs: list[int] = []

    def body(self: Task) -> Any:
        runs.append(self.request.retries)
        if len(runs) > 1:
            return "done"
        # As a crash of the server leaves it that takes the claim away.
        recorded.do(forget)
        return end(self)

    def forget(connection, tables):
        before = {"state": "queued", "attempt": 0, "deliveries": 0, "lease_token": 0}
        nobody = {"leased_by": None, "leased_until": None}
        connection.execute(update(tables.job).values(**before, **nobody))

    task = add_task(outbox.app, body, bind=True, transactional=transactional)
    task.apply_async(task_id="job-1")
    first = outcome(task, "job-1")
    assert (first.state, first.retval.requeue) == ("REJECTED", True)
    assert (recorded.job("job-1").state, recorded.job("job-1").attempt) == ("queued", 0)
    assert recorded.events("job-1") == ["recorded", "claimed"]
    assert len(recorded.messages("job-1")) == 1

    assert again(task, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, job.attempt, runs) == ("succeeded", 1, [0, 0])


def test_idempotency_key_and_lease_belong_to_the_job(outbox):
    seen: list[Any] = []
    task = add_task(
        outbox.app, lambda self: seen.append((self.idempotency_key, self.lease.token)), bind=True
    )
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert seen == [("job-1", 1)]


def test_another_task_called_in_the_body_is_a_plain_call(outbox, recorded):
    inner = add_task(outbox.app, lambda: "inner", name="shop.inner")
    task = add_task(outbox.app, lambda: (inner(), inner.apply().get()))
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    assert json.loads(recorded.job("job-1").result) == ["inner", "inner"]
    assert recorded.counts()[0] == 1


def test_a_task_that_calls_itself_is_guarded_once(outbox, recorded):
    def body(self, number):
        return number if number == 0 else self(number - 1)

    task = add_task(outbox.app, body, bind=True)
    task.apply_async((3,), task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    assert recorded.events("job-1") == ["recorded", "claimed", "succeeded"]


def test_a_task_with_the_base_class_alone_brings_its_steps_to_the_worker():
    from celery_outbox import OutboxTask
    from celery_outbox.execute.steps import DeclareQuarantine, Heartbeat

    app = make_stock_app(outbox_database_url="sqlite://")
    add_task(app, base=OutboxTask)
    assert Heartbeat in app.steps["worker"]
    assert DeclareQuarantine in app.steps["consumer"]


@pytest.mark.parametrize("option", ["irreversible", "exclusive"])
def test_an_option_that_does_not_exist_yet_is_refused(outbox, option):
    with pytest.raises(Exception, match=f"does not have {option}"):
        add_task(outbox.app, **{option: True})


def test_options_that_would_lose_jobs_are_overruled_and_the_log_says_so(outbox, caplog):
    task = add_task(outbox.app, acks_late=False, reject_on_worker_lost=True)
    assert {name: getattr(task, name) for name in celery_versions.FIXED_OPTIONS} == dict(
        celery_versions.FIXED_OPTIONS
    )
    told = [record.outbox_option for record in caplog.records if hasattr(record, "outbox_option")]
    assert told == ["acks_late", "reject_on_worker_lost"]


# -- the answer to a commit is lost ----------------------------------------------------


@pytest.fixture
def lose_answer(outbox: Outbox) -> Iterator[Callable[[], None]]:
    """Makes the next commit on PostgreSQL one that the server makes and nobody hears of."""
    commit, armed = outbox.engine.dialect.do_commit, []

    def unheard(connection: Any) -> None:
        commit(connection)
        if armed:
            armed.clear()
            connection.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")

    outbox.engine.dialect.do_commit = unheard
    yield lambda: armed.append(True)
    outbox.engine.dialect.do_commit = commit
    assert not armed


@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
@pytest.mark.parametrize(
    ("error", "state", "seen"),
    [
        (None, "succeeded", "SUCCESS"),
        (ConnectionError(), "retrying", "RETRY"),
        (PermanentError(), "quarantined", "FAILURE"),
    ],
)
def test_an_end_that_was_committed_unheard_is_this_attempt_s_end(
    outbox, recorded, lose_answer, error, state, seen
):
    # Taken for another's, the callbacks would never be sent, and the message never rejected.
    letter = add_task(outbox.app, name="shop.letter")

    def body() -> None:
        lose_answer()
        if error is not None:
            raise error

    task = add_task(outbox.app, body, retry_policy=AT_ONCE)
    task.apply_async(task_id="job-1", link=letter.si())
    assert deliver(task, "job-1") == seen
    assert recorded.job("job-1").state == state
    assert "stale" not in recorded.events("job-1")
    assert len(outbox.control.find(task="shop.letter")) == (state == "succeeded")


@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
def test_a_claim_that_was_committed_unheard_is_this_delivery_s_claim(outbox, recorded, lose_answer):
    task = add_task(outbox.app, lambda: "done", max_attempts=1)
    task.apply_async(task_id="job-1")
    lose_answer()
    assert deliver(task, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, job.attempt, job.deliveries) == ("succeeded", 1, 1)
    assert recorded.events("job-1") == ["recorded", "claimed", "succeeded"]


@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
def test_a_claim_of_another_process_of_the_worker_is_not_taken_for_one_s_own(
    outbox, recorded, monkeypatch
):
    task = add_task(outbox.app, lambda: "done")
    task.apply_async(task_id="job-1")
    claim, rolled_back = Claim.at_once, []

    def overtaken(self: Claim, connection: Any) -> Any:
        if not rolled_back:
            rolled_back.append(self)
            # The same worker, the same token: only not the same claim.
            worker = {"actor": outbox.worker_id, "lease": 60.0}
            recorded.do(transitions.claim, recorded.job("job-1"), **worker)
            raise OperationalError("", {}, SerializationFailure())
        return claim(self, connection)

    monkeypatch.setattr(Claim, "at_once", overtaken)
    assert deliver(task, "job-1") == "IGNORED"
    assert recorded.events("job-1") == ["recorded", "claimed", "deferred"]


class SerializationFailure(Exception):
    """As a driver raises it."""

    pgcode = "40001"
