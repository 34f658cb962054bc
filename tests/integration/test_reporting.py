"""The end of a job is told outside its body, too: what follows it is lost in no surroundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Task, chord, signals
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.exceptions import WorkerLostError
from kombu.message import Message
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox import Outbox, RetryPolicy
from celery_outbox.core.reasons import Reason
from celery_outbox.execute.request import OutboxRequest
from celery_outbox.operate.maintenance import Maintained
from celery_outbox.operate.reports import request_of as request_of_row
from celery_outbox.store import quarantining, transitions
from celery_outbox.store.clock import db_after
from tests.factories import Database, make_app
from tests.integration.delivering import add_task, deliver
from tests.integration.shop import Shop


@pytest.fixture(params=["sqlite", "postgresql"])
def installed_url(request: pytest.FixtureRequest) -> str:
    """A database with one writer at a time, and one with many."""
    return request.getfixturevalue(f"{request.param}_installed_url")


@pytest.fixture(params=["plain", "configured", "in use", "required"])
def shop(request: pytest.FixtureRequest, installed_url: str) -> Iterator[Shop]:
    """A shop where calls are made with or without a session that nobody commits."""
    required = request.param == "required"
    app = make_app(outbox_database_url=installed_url, outbox_require_transaction=required)
    outbox = Outbox(app)
    scoped = scoped_session(sessionmaker(outbox.engine))
    if request.param == "configured":
        outbox = Outbox(app, engine=outbox.engine, session=scoped)
    shop = Shop(outbox, Database(outbox.engine, outbox.tables))
    if request.param != "in use":
        yield shop
    else:
        with outbox.use(scoped):
            yield shop
    scoped.remove()
    outbox.engine.dispose()


@contextmanager
def committed(shop: Shop) -> Iterator[None]:
    """Commit the calls that are made in this block."""
    with Session(shop.outbox.engine) as session, session.begin(), shop.outbox.use(session):
        yield


def call_chord(shop: Shop) -> str:
    """Call a chord with an error callback, and run the first of its members; return the other."""
    with committed(shop):
        chord([shop.part.s(1), shop.refuse.s()])(shop.body.s().on_error(shop.errback.s()))
    shop.run(shop.part)
    [waits] = shop.waiting("shop.refuse")
    return waits


def park(shop: Shop, job_id: str) -> None:
    why: dict[str, Any] = {"reason": Reason.UNROUTABLE, "copy": False}
    shop.recorded.do(quarantining.quarantine_waiting, job_id, attempt=0, actor="d", **why)


def cancel(shop: Shop, job_id: str) -> None:
    shop.outbox.control.cancel(job_id)


def expire(shop: Shop, job_id: str) -> None:
    shop.recorded.do(transitions.expire, job_id, attempt=0, actor="m")


ENDINGS: list[Callable[[Shop, str], None]] = [park, cancel, expire]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda each: each.__name__)
def test_the_maintenance_calls_back_for_a_member_that_ended_without_a_worker(shop, ending):
    ending(shop, call_chord(shop))
    assert shop.members.count() == 1
    assert [state for state, *_ in shop.chords()] == ["failed"]
    assert len(shop.waiting("shop.errback")) == 1


@pytest.mark.parametrize("ending", [cancel, expire], ids=lambda each: each.__name__)
def test_a_worker_calls_back_for_a_member_that_it_does_not_begin(shop, ending):
    waits = call_chord(shop)
    ending(shop, waits)
    told = []

    def on_revoked(request: Any, **_: Any) -> None:
        told.append(shop.part.delay(2).id)

    signals.task_revoked.connect(on_revoked)
    try:
        assert deliver(shop.refuse, waits) == "IGNORED"
    finally:
        signals.task_revoked.disconnect(on_revoked)
    assert [state for state, *_ in shop.chords()] == ["failed"]
    assert len(shop.waiting("shop.errback")) == 1
    assert shop.waiting("shop.part") == told


def test_a_worker_calls_back_for_a_job_that_it_gives_up_at_the_claim(shop):
    last = add_task(shop.outbox.app, name="shop.last", max_attempts=1)
    with committed(shop):
        job_id = last.apply_async(link_error=shop.errback.s()).id
    shop.recorded.do(transitions.claim, shop.recorded.job(job_id), actor="gone", lease=60)
    shop.recorded.end_lease(job_id)
    deliver(last, job_id)
    assert shop.recorded.job(job_id).reason == "lost_worker"
    assert len(shop.waiting("shop.errback")) == 1


def request_of(shop: Shop, task: Task, job_id: str) -> OutboxRequest:
    """Return what the worker's main process has of a delivery."""
    message = Message(
        body="[[], {}, {}]",
        headers={"id": job_id, "task": task.name, "lang": "py", "outbox_version": 1},
        delivery_info={"exchange": "", "routing_key": "celery", "redelivered": False},
        content_type="application/json",
        content_encoding="utf-8",
    )
    return OutboxRequest(
        message,
        app=shop.outbox.app,
        task=task,
        hostname="worker",
        on_ack=lambda *args: None,
        on_reject=lambda *args: None,
    )


def lose_child(request: OutboxRequest) -> None:
    try:
        raise WorkerLostError("killed")
    except WorkerLostError:
        request.on_failure(ExceptionInfo())


def exceed_time_limit(request: OutboxRequest) -> None:
    request.on_timeout(False, 2.0)


@pytest.mark.parametrize("ending", [lose_child, exceed_time_limit])
def test_the_main_process_calls_back_for_a_process_that_is_gone(shop, ending):
    def on_failure(**_: Any) -> None:
        shop.part.delay("signal")

    task = add_task(shop.outbox.app, name="shop.last", retry_policy=RetryPolicy(1))
    with committed(shop):
        job_id = task.apply_async(link_error=shop.errback.s()).id
    signals.task_failure.connect(on_failure)
    try:
        ending(request_of(shop, task, job_id))
    finally:
        signals.task_failure.disconnect(on_failure)
    assert shop.recorded.job(job_id).state == "quarantined"
    assert len(shop.waiting("shop.errback")) == 1
    assert len(shop.waiting("shop.part")) == 1


def test_the_main_process_calls_back_for_a_job_that_was_revoked_before_it_ran(shop):
    with committed(shop):
        job_id = shop.refuse.delay().id
    request = request_of(shop, shop.refuse, job_id)

    def on_revoked(**_: Any) -> None:
        shop.part.delay("signal")

    signals.task_revoked.connect(on_revoked)
    try:
        request._announce_revoked("revoked", False, None, False)
    finally:
        signals.task_revoked.disconnect(on_revoked)
    assert shop.recorded.job(job_id).state == "cancelled"
    assert len(shop.waiting("shop.part")) == 1


def test_a_task_without_the_outbox_calls_back_jobs(shop):
    backend = shop.outbox.app.backend
    errback = shop.errback.s().set(task_id="told")
    request = Context(id="bare-1", errbacks=[dict(errback)], delivery_info={})
    backend.mark_as_failure("bare-1", ValueError("no"), request=request)
    assert shop.waiting("shop.errback") == ["told"]


def test_an_error_callback_that_the_database_does_not_take_is_called_later(shop, monkeypatch):
    cancel(shop, call_chord(shop))
    with monkeypatch.context() as away:

        def fail(*args: Any) -> None:
            raise OperationalError("INSERT", {}, Exception("no such luck"))

        away.setattr(shop.outbox.database, "write_all", fail)
        assert shop.members.count() == 0
    assert [state for state, *_ in shop.chords()] == ["open"]
    assert shop.members.count() == 1
    assert [state for state, *_ in shop.chords()] == ["failed"]
    assert len(shop.waiting("shop.errback")) == 1


def test_a_callback_has_its_own_sessions_for_its_own_calls(shop):
    def tell(request: Any, error: Any, traceback: Any) -> None:
        session = Session(shop.outbox.engine)
        with shop.outbox.use(session):
            session.execute(text("SELECT 1"))
            shop.part.delay("rolled back")
            session.rollback()
            shop.part.apply_async(("kept",), task_id="kept")
            session.commit()
        session.close()

    told = add_task(shop.outbox.app, tell, name="shop.tell")
    request = Context(id="bare-1", errbacks=[dict(told.s())], delivery_info={})
    shop.outbox.app.backend.mark_as_failure("bare-1", ValueError("no"), request=request)
    assert shop.waiting("shop.part") == ["kept"]


def test_a_task_without_the_outbox_calls_back_in_no_session_that_nobody_commits(installed_url):
    app = make_app(outbox_database_url=installed_url)
    scoped = scoped_session(sessionmaker(Outbox(app).engine))
    outbox = Outbox(app, session=scoped)
    shop = Shop(outbox, Database(outbox.engine, outbox.tables))
    bare = add_task(app, lambda: 1, name="shop.bare", base=Task)
    trace = build_tracer(bare.name, bare, app=app)
    callback = dict(shop.part.s().set(task_id="linked"))
    traced = trace("bare-1", [], {}, {"id": "bare-1", "callbacks": [callback]})
    assert traced.info is None
    scoped.remove()
    assert shop.waiting("shop.part") == ["linked"]
    outbox.engine.dispose()


def lose(shop: Shop, **options: Any) -> str:
    """Let the worker of a job die in its last attempt, with no message left of it."""
    last = add_task(shop.outbox.app, name="shop.last", max_attempts=1)
    with committed(shop):
        job_id = str(last.apply_async(link_error=shop.errback.s(), **options).id)
    shop.recorded.do(transitions.claim, shop.recorded.job(job_id), actor="gone", lease=60)
    shop.recorded.end_lease(job_id)
    return job_id


def maintain(shop: Shop) -> Maintained:
    """Run the maintenance as a dispatcher does."""
    return shop.outbox.maintenance.run()


def let_it_be_due(shop: Shop, job_id: str, ended: float = 0.0) -> None:
    """Let the end of a job be told again now, as one of some seconds ago."""
    job = shop.recorded.tables.job
    due = {"report_at": db_after(-1), "finished_at": db_after(-ended)}
    shop.recorded.execute(update(job).where(job.c.id == job_id).values(**due))


def test_the_maintenance_tells_of_a_job_whose_worker_is_gone_in_its_last_attempt(shop):
    job_id = lose(shop)
    done = maintain(shop)
    assert (done.quarantined, done.reported) == (1, 1)
    state, error = shop.reaches(job_id)
    assert state == "FAILURE"
    assert "lost_worker" in error
    assert len(shop.waiting("shop.errback")) == 1
    # Once; a worker that meets a message of it after all changes nothing.
    assert maintain(shop).reported == 0
    info = {"exchange": "", "routing_key": "celery", "redelivered": True}
    deliver(shop.outbox.app.tasks["shop.last"], job_id, delivery_info=info)
    assert shop.reaches(job_id)[0] == "FAILURE"
    assert len(shop.waiting("shop.errback")) == 1


def test_the_maintenance_tells_of_a_job_that_the_dispatcher_refused(shop):
    with committed(shop):
        job_id = shop.part.apply_async((1,), link_error=shop.errback.s()).id
    park(shop, job_id)
    assert maintain(shop).reported == 1
    assert shop.reaches(job_id)[0] == "FAILURE"
    assert len(shop.waiting("shop.errback")) == 1


def test_the_maintenance_tells_of_a_job_that_expired_before_it_was_delivered(shop):
    with committed(shop):
        job_id = shop.part.apply_async((1,), link_error=shop.errback.s(), expires=60).id
    job = shop.recorded.tables.job
    shop.recorded.execute(update(job).where(job.c.id == job_id).values(expires_at=db_after(-1)))
    done = maintain(shop)
    assert (done.expired, done.reported) == (1, 1)
    assert shop.reaches(job_id) == ("REVOKED", "expired")
    # Celery calls no error callbacks for what was revoked.
    assert shop.waiting("shop.errback") == []


@pytest.mark.parametrize("ending", [park, expire], ids=lambda each: each.__name__)
def test_what_is_told_of_a_member_ends_its_chord_once(shop, ending):
    ending(shop, call_chord(shop))
    assert maintain(shop).reported == 1
    assert [state for state, *_ in shop.chords()] == ["failed"]
    assert shop.members.count() == 0
    assert len(shop.waiting("shop.errback")) == 1


def test_the_result_of_a_job_that_nobody_wants_is_not_stored_and_its_callback_is_called(shop):
    job_id = lose(shop, ignore_result=True)
    assert maintain(shop).reported == 1
    assert shop.reaches(job_id)[0] == "PENDING"
    assert len(shop.waiting("shop.errback")) == 1


def test_a_job_whose_row_cannot_be_read_is_told_of(shop):
    job_id = lose(shop)
    job = shop.recorded.tables.job
    shop.recorded.execute(update(job).where(job.c.id == job_id).values(body=b"\xff"))
    assert maintain(shop).reported == 1
    assert shop.reaches(job_id)[0] == "FAILURE"


def test_a_job_that_a_person_has_replayed_is_not_told_of(shop):
    with committed(shop):
        job_id = shop.part.apply_async((1,), link_error=shop.errback.s()).id
    park(shop, job_id)
    shop.outbox.control.replay(job_id)
    assert maintain(shop).reported == 0
    assert deliver(shop.part, job_id) == "SUCCESS"
    assert maintain(shop).reported == 0
    assert shop.reaches(job_id) == ("SUCCESS", "1")
    assert shop.waiting("shop.errback") == []


def test_an_end_that_cannot_be_told_is_told_later_and_delays_no_other(shop, monkeypatch):
    stuck, other = lose(shop), lose(shop)
    backend = type(shop.outbox.app.backend._get_current_object())
    stock = backend.store_result

    def store(self: Any, job_id: str, *args: Any, **options: Any) -> Any:
        if job_id == stuck:
            raise ConnectionError("away")
        return stock(self, job_id, *args, **options)

    with monkeypatch.context() as away:
        away.setattr(backend, "store_result", store)
        done = maintain(shop)
        assert (done.quarantined, done.reported) == (2, 1)
        # Not at once again.
        assert maintain(shop).reported == 0
        assert shop.reaches(other)[0] == "FAILURE"
        assert shop.recorded.job(stuck).report_at is not None
    let_it_be_due(shop, stuck)
    assert maintain(shop).reported == 1
    assert shop.reaches(stuck)[0] == "FAILURE"
    assert shop.recorded.job(stuck).report_at is None
    assert len(shop.waiting("shop.errback")) == 2


def test_an_end_that_cannot_be_told_for_a_day_is_given_up(shop, monkeypatch):
    job_id = lose(shop)

    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(type(shop.outbox.app.backend._get_current_object()), "store_result", fail)
    assert maintain(shop).reported == 0
    let_it_be_due(shop, job_id, ended=2 * 86400.0)
    assert maintain(shop).reported == 0
    assert shop.recorded.job(job_id).report_at is None


def test_an_answer_to_a_caller_with_rpc_names_its_queue_and_its_call(shop):
    job_id = lose(shop, reply_to="caller", correlation_id="call-1")
    request = request_of_row(shop.outbox.app, shop.recorded.job(job_id))
    assert (request.reply_to, request.correlation_id) == ("caller", "call-1")
