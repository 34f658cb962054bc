"""Calls by name: recorded as a job of ours, sent as in Celery, or relayed to another service."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from celery import Celery, Task, chain, signals, signature
from celery.app.trace import build_tracer
from celery.beat import ScheduleEntry, Scheduler
from kombu import Connection, Queue
from sqlalchemy import update
from sqlalchemy.orm import Session

from celery_outbox import Outbox, OutboxTask
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.dispatch.wire import build
from celery_outbox.exceptions import ConfigurationError, NoTransaction
from celery_outbox.execute.examine import Fault
from celery_outbox.execute.foreign import Foreign
from celery_outbox.execute.outside import end_foreign
from celery_outbox.store import messages as outbox_messages
from celery_outbox.store import publishing
from tests.factories import Database, add_task, make_app, make_stock_app, open_outbox
from tests.integration.delivering import deliver

FOREIGN = "billing.invoice"


def add(x: int, y: int = 0) -> int:
    return x + y


def published(recorded: Database) -> list:
    """Publish everything, as far as the database is concerned; returns the messages."""
    claimed = recorded.do(outbox_messages.claim, claim="c", lease=60, limit=100)
    recorded.do(publishing.mark, claimed, "c", actor="dispatcher")
    return claimed


def deliver_in_full(recorded: Database, task: Task, job_id: str) -> str:
    """Deliver the message of a relayed job to a worker that has the task."""
    job = recorded.job(job_id)
    args, kwargs, embed = json.loads(job.body)
    if task._celery_tracer is None:
        task.__trace__ = build_tracer(task.name, task, app=task.app)
    request = {**job.envelope.headers, **embed, "hostname": "worker"}
    request["delivery_info"] = {"exchange": "", "routing_key": "celery", "redelivered": False}
    traced = task.__trace__(job_id, args, kwargs, request)
    return "SUCCESS" if traced.info is None else traced.info.state


def test_a_call_by_name_of_a_task_with_the_outbox_is_its_job(installed_url, tmp_path):
    store = {"outbox_result_store": f"file://{tmp_path}"}
    with open_outbox(installed_url, init=False, **store) as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        add_task(outbox.app, add, max_attempts=7, result_key="sums/{job_id}-{0}")
        with Session(outbox.engine) as session:
            rolled_back = outbox.app.send_task("shop.export", (1,), session=session)
        with Session(outbox.engine) as session, session.begin():
            result = outbox.app.send_task("shop.export", (1, 2), {}, 60, session=session)
        job = recorded.job(result.id)
        assert recorded.counts()[0] == 1
    assert rolled_back.id != result.id
    assert (job.task, job.max_attempts, job.relay) == ("shop.export", 7, False)
    assert job.result_key == f"sums/{result.id}-1"
    assert json.loads(job.body)[0] == [1, 2]
    # The countdown.
    assert job.available_at > job.recorded_at + timedelta(seconds=30)
    assert job.envelope.headers["eta"] is None


def test_a_task_without_the_outbox_is_sent_by_name_as_in_celery(outbox, recorded):
    outbox.app.conf.broker_url = "memory://"
    add_task(outbox.app, add, name="shop.plain", base=Task)
    result = outbox.app.send_task("shop.plain", (1,))
    with outbox.app.connection_for_read() as connection:
        message = connection.default_channel.basic_get("celery")
    assert message.headers["id"] == result.id
    assert recorded.counts() == (0, 0, 0)


def test_a_task_that_the_app_does_not_have_is_recorded_to_be_relayed(outbox, recorded):
    call = {"args": ("secret", 1), "kwargs": {"month": "2026-01"}, "queue": "billing"}
    result = outbox.app.send_task(FOREIGN, **call, task_id="invoice-1", expires=600, priority=3)
    again = outbox.app.send_task(FOREIGN, ("other",), task_id="invoice-1")
    job = recorded.job("invoice-1")
    assert result.id == again.id == "invoice-1"
    assert (job.task, job.queue, job.relay, job.state) == (FOREIGN, "billing", True, State.QUEUED)
    (message,) = recorded.do(outbox_messages.claim, claim="c", lease=60, limit=10)
    sent = build(message, Queue("quarantine"))
    assert json.loads(sent.body)[:2] == [["secret", 1], {"month": "2026-01"}]
    assert "secret" not in json.dumps(sent.headers)
    assert (sent.routing_key, sent.properties["priority"]) == ("billing", 3)
    assert 500_000 < int(sent.properties["expiration"]) <= 600_000
    recorded.do(publishing.mark, [message], "c", actor="dispatcher")
    assert outbox.job("invoice-1").state == "relayed"
    events = [event.event for event in outbox.control.journal("invoice-1")]
    assert sorted(events) == ["published", "recorded", "relayed"]


def test_the_message_by_name_is_celerys_but_for_what_the_design_changes(outbox, recorded):
    stock = make_stock_app(broker_url="memory://")
    options = {"queue": "billing", "headers": {"x": 1}, "shadow": "s", "root_id": "r"}
    stock.send_task(FOREIGN, (1,), {"y": 2}, task_id="job-1", reply_to="me", **options)
    with stock.connection_for_read() as connection:
        theirs = connection.default_channel.basic_get("billing")
    outbox.app.send_task(FOREIGN, (1,), {"y": 2}, task_id="job-1", reply_to="me", **options)
    ours = recorded.job("job-1").envelope.headers
    changed = {name for name in theirs.headers if theirs.headers[name] != ours[name]}
    assert changed == {"argsrepr", "kwargsrepr"}
    assert set(ours) == set(theirs.headers)
    assert recorded.job("job-1").body == theirs.body


def test_a_call_by_name_opens_no_connection_and_neither_does_its_result(
    sqlite_installed_url, monkeypatch
):
    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(Connection, "_establish_connection", refuse)
    settings = {"result_backend": "rpc://", "task_send_sent_event": True}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        result = outbox.app.send_task(FOREIGN, (1,), countdown=5)
        assert outbox.job(result.id).state == "queued"


def test_whoever_asks_for_a_producer_or_connection_of_his_own_records_all_the_same(
    outbox, recorded
):
    task = add_task(outbox.app, add)
    with Connection("memory://") as connection:
        ids = [
            task.apply_async((1,), connection=connection).id,
            outbox.app.send_task("shop.export", (1,), connection=connection).id,
            outbox.app.send_task(FOREIGN, producer=connection.Producer()).id,
            Task.apply_async(task, (1,)).id,
        ]
    assert [recorded.job(job_id).state for job_id in ids] == [State.QUEUED] * 4


def test_signatures_of_foreign_tasks_and_steps_of_chains_are_relayed(outbox, recorded):
    task = add_task(outbox.app, add)
    signature(FOREIGN, (1,), app=outbox.app).delay()
    signature(FOREIGN, (1,), app=outbox.app, task_id="set").apply_async()
    steps = chain(signature(FOREIGN, (2,), app=outbox.app), task.s(3))
    last = steps.apply_async()
    first = recorded.job(last.parent.id)
    assert (first.task, first.relay) == (FOREIGN, True)
    assert [step["task"] for step in json.loads(first.body)[2]["chain"]] == ["shop.export"]
    assert recorded.job("set").relay
    assert recorded.counts()[0] == 3


def test_the_next_step_of_a_chain_may_be_another_services(outbox, recorded):
    task = add_task(outbox.app, add)
    last = chain(task.s(1, 2), signature(FOREIGN, app=outbox.app)).apply_async()
    assert deliver(task, last.parent.id) == "SUCCESS"
    step = recorded.job(last.id)
    assert (step.task, step.relay, json.loads(step.body)[0]) == (FOREIGN, True, [3])


def test_a_task_that_is_marked_as_relayed_is_relayed_however_it_is_called(outbox, recorded):
    task = add_task(outbox.app, add, name=FOREIGN, relayed=True, result_key="{job_id}")
    ids = [task.delay(1).id, task.s(1).delay().id, outbox.app.send_task(FOREIGN, (1,)).id]
    assert [recorded.job(job_id).relay for job_id in ids] == [True] * 3
    assert {recorded.job(job_id).result_key for job_id in ids} == {None}


def test_relayed_is_checked_when_the_task_is_registered(outbox):
    with pytest.raises(ConfigurationError, match=r"relayed of task shop\.export"):
        add_task(outbox.app, relayed="yes")


def test_an_app_that_uses_the_outbox_for_single_tasks_sends_unknown_names_as_celery_does(
    sqlite_installed_url,
):
    app = Celery("mixed", broker="memory://", set_as_current=False)
    app.conf.outbox_database_url = sqlite_installed_url
    outbox = Outbox(app)
    add_task(app, add, base=OutboxTask)
    recorded = Database(outbox.engine, outbox.tables)
    app.send_task(FOREIGN, queue="billing")
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get("billing").headers["task"] == FOREIGN
    assert recorded.counts()[0] == 0
    app.send_task("shop.export", (1,))
    assert recorded.counts()[0] == 1
    outbox.engine.dispose()


def test_what_a_worker_imports_is_known_to_a_call_by_name(outbox, recorded):
    imports = []

    def import_modules(sender, **_):
        imports.append(sender)
        add_task(outbox.app, add, name="shop.late", max_attempts=9)

    signals.import_modules.connect(import_modules, sender=outbox.app)
    job = recorded.job(outbox.app.send_task("shop.late", (1,)).id)
    outbox.app.send_task(FOREIGN)
    outbox.app.send_task(FOREIGN)
    assert (job.relay, job.max_attempts) == (False, 9)
    assert len(imports) == 1


def test_a_call_by_name_outside_a_transaction_is_an_error_where_one_is_required(outbox):
    outbox.app.conf.outbox_require_transaction = True
    with pytest.raises(NoTransaction, match=FOREIGN):
        outbox.app.send_task(FOREIGN)


def test_a_call_by_name_in_a_body_belongs_to_its_transaction(outbox, recorded):
    def body(self, fails):
        self.app.send_task(FOREIGN, task_id=f"invoice-{fails}")
        if fails:
            raise ValueError

    task = add_task(outbox.app, body, bind=True, transactional=True)
    for fails in (False, True):
        task.apply_async((fails,), task_id=f"job-{fails}")
        deliver(task, f"job-{fails}")
    assert recorded.job("job-True").state is State.QUARANTINED
    assert recorded.job("invoice-False").relay
    assert recorded.counts()[0] == 3


def test_beat_ticks_for_a_task_that_it_has_not_imported(outbox, recorded):
    scheduler = Scheduler(outbox.app, lazy=True)
    entry = ScheduleEntry("nightly", FOREIGN, schedule=10, args=(1,), app=outbox.app)
    result = scheduler.apply_async(entry, producer=None, advance=False)
    assert recorded.job(result.id).relay


@pytest.mark.parametrize("marked", [True, False], ids=["after-its-mark", "before-its-mark"])
def test_a_relayed_message_that_comes_to_a_worker_with_the_task_is_a_job_of_its_own(
    outbox, recorded, marked
):
    runs = []
    job_id = outbox.app.send_task("shop.late", (20, 22)).id
    claimed = recorded.do(outbox_messages.claim, claim="c", lease=60, limit=10)
    if marked:
        recorded.do(publishing.mark, claimed, "c", actor="dispatcher")
        assert recorded.job(job_id).state is State.RELAYED

    def body(x, y):
        runs.append(x + y)
        if len(runs) == 1:
            raise ConnectionError
        return x + y

    task = add_task(outbox.app, body, name="shop.late", max_attempts=8)
    assert deliver_in_full(recorded, task, job_id) == "RETRY"
    if not marked:
        recorded.do(publishing.mark, claimed, "c", actor="dispatcher")
    job = recorded.job(job_id)
    assert (job.state, job.relay, job.max_attempts) == (State.RETRYING, False, 8)
    recorded.execute(update(recorded.tables.job).values(available_at=job.recorded_at))
    assert deliver(task, job_id) == "SUCCESS"
    # A copy of the first message: the dispatcher died before it had marked it.
    assert deliver_in_full(recorded, task, job_id) == "SUCCESS"
    assert runs == [42, 42]
    assert recorded.job(job_id).state is State.SUCCEEDED
    assert ("adopted" in recorded.events(job_id)) is marked


@pytest.mark.parametrize("marked", [True, False], ids=["after-its-mark", "before-its-mark"])
def test_a_name_that_no_worker_of_ours_knows_ends_in_quarantine_and_can_be_replayed(
    outbox, recorded, marked
):
    job_id = outbox.app.send_task("shop.typo", (1,)).id
    if marked:
        published(recorded)
    job = recorded.job(job_id)
    foreign = Foreign.kept(job.envelope, job.body, job.envelope.headers, False)
    fault = Fault(Reason.UNKNOWN_TASK, "unknown_task")
    assert end_foreign(outbox.guard, foreign, fault.reason, fault.code) == (job_id, True)
    assert end_foreign(outbox.guard, foreign, fault.reason, fault.code) == (job_id, True)
    assert outbox.job(job_id).reason == "unknown_task"
    assert recorded.counts()[0] == 1
    outbox.control.replay(job_id)
    task = add_task(outbox.app, add, name="shop.typo")
    published(recorded)
    assert deliver_in_full(recorded, task, job_id) == "SUCCESS"
    assert recorded.job(job_id).state is State.SUCCEEDED


def test_a_relayed_message_whose_result_key_cannot_be_filled_ends_in_quarantine(outbox, recorded):
    job_id = outbox.app.send_task("shop.late", (1,)).id
    published(recorded)
    task = add_task(outbox.app, add, name="shop.late", result_key="{month}")
    deliver_in_full(recorded, task, job_id)
    job = recorded.job(job_id)
    assert (job.state, job.reason) == (State.QUARANTINED, "undecodable")
    assert [each.kind for each in recorded.messages(job_id)] == ["quarantine"]


def test_a_body_that_goes_on_as_a_task_of_another_service_is_relayed(outbox, recorded):
    def body(self, x):
        raise self.replace(signature(FOREIGN, (x,), app=self.app))

    task = add_task(outbox.app, body, bind=True)
    job_id = task.delay(7).id
    assert deliver(task, job_id) == "IGNORED"
    job = recorded.job(job_id)
    assert (job.state, job.task, job.relay) == (State.RETRYING, FOREIGN, True)
    published(recorded)
    assert recorded.job(job_id).state is State.RELAYED
    # And comes to a worker of ours after all.
    theirs = add_task(outbox.app, add, name=FOREIGN, max_attempts=4)
    deliver_in_full(recorded, theirs, job_id)
    job = recorded.job(job_id)
    assert (job.attempt, job.attempts_before, job.max_attempts) == (2, 1, 5)


def test_a_relayed_job_that_nobody_published_in_time_expires(outbox, recorded):
    job_id = outbox.app.send_task(FOREIGN, expires=60).id
    recorded.execute(
        update(recorded.tables.job).values(expires_at=recorded.job(job_id).recorded_at)
    )
    outbox.maintenance.run()
    assert recorded.job(job_id).state is State.EXPIRED


def test_a_relayed_job_can_be_cancelled_before_it_is_published(outbox, recorded):
    job_id = outbox.app.send_task(FOREIGN).id
    outbox.control.cancel(job_id)
    assert recorded.job(job_id).state is State.CANCELLED
    assert recorded.messages(job_id) == []


def test_what_instruments_celery_after_the_app_was_bound_sees_calls_by_name(
    outbox, recorded, monkeypatch
):
    seen = []
    celerys = Celery.send_task

    def instrumented(self, name, *args, **options):
        seen.append(name)
        return celerys(self, name, *args, **options)

    monkeypatch.setattr(Celery, "send_task", instrumented)
    outbox.app.send_task(FOREIGN)
    add_task(outbox.app, add).delay(1)
    assert seen == [FOREIGN, "shop.export"]
    assert recorded.counts()[0] == 2


def test_an_apps_own_send_task_is_called(sqlite_installed_url, monkeypatch):
    app = make_app(outbox_database_url=sqlite_installed_url)
    names = []

    def own(name, *args, **options):
        names.append(name)
        return Celery.send_task(app, name, *args, **options)

    app.send_task = own
    outbox = Outbox(app)
    result = app.send_task(FOREIGN)
    assert names == [FOREIGN]
    assert outbox.job(result.id).state == "queued"
    # A second outbox for the app takes the first one's place.
    second = Outbox(app)
    assert second.job(app.send_task(FOREIGN).id).state == "queued"
    assert names == [FOREIGN, FOREIGN]
    outbox.engine.dispose()
    second.engine.dispose()


def test_routes_and_priorities_hold_for_recorded_named_and_retried_jobs(outbox, recorded):
    outbox.app.conf.task_routes = {
        "shop.*": {"queue": "exports", "priority": 7},
        "billing.*": {"queue": "billing", "priority": 2},
    }

    def fail():
        raise ConnectionError

    task = add_task(outbox.app, fail)
    ids = [task.delay().id, outbox.app.send_task("shop.export").id]
    foreign = outbox.app.send_task(FOREIGN).id

    def routes() -> dict:
        claimed = recorded.do(outbox_messages.claim, claim="c", lease=60, limit=10)
        recorded.do(publishing.mark, claimed, "c", actor="dispatcher")
        wires = [build(message, Queue("quarantine")) for message in claimed]
        return {w.headers["id"]: (w.routing_key, w.properties["priority"]) for w in wires}

    ours = dict.fromkeys(ids, ("exports", 7))
    assert routes() == {**ours, foreign: ("billing", 2)}
    for job_id in ids:
        assert deliver(task, job_id) == "RETRY"
    message = recorded.tables.message
    recorded.execute(
        update(message).where(message.c.published_at.is_(None)).values(due_at=message.c.created_at)
    )
    assert routes() == ours
