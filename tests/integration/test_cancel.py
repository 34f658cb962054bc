"""Jobs are taken back in the database: by revoke, and in the caller's own transaction."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery, chord, group, signals
from celery.app.control import Control
from celery.result import AsyncResult, GroupResult
from kombu.exceptions import OperationalError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox import Outbox, UnknownJob, WrongState
from celery_outbox.control_class import OutboxControl
from celery_outbox.core.states import State
from celery_outbox.exceptions import ConfigurationError
from celery_outbox.execute.outside import end_revoked
from celery_outbox.store import messages as outbox_messages
from celery_outbox.store import publishing
from tests.factories import Database, add_task, make_app, open_outbox
from tests.integration.delivering import deliver
from tests.integration.shop import Shop


@pytest.fixture
def broadcasts(monkeypatch):
    """What is sent to the workers."""
    sent: list[tuple[str, dict]] = []

    def broadcast(self, command, arguments=None, destination=None, **options):
        sent.append((command, arguments))
        return [{"worker": {"ok": []}}]

    monkeypatch.setattr(Control, "broadcast", broadcast)
    return sent


@pytest.fixture
def shop(outbox: Outbox, recorded: Database) -> Shop:
    return Shop(outbox, recorded)


@pytest.fixture
def broker_down(monkeypatch):
    def broadcast(self, *args, **options):
        raise OperationalError("nobody there")

    monkeypatch.setattr(Control, "broadcast", broadcast)


def published(recorded: Database) -> None:
    claimed = recorded.do(outbox_messages.claim, claim="c", lease=60, limit=100)
    recorded.do(publishing.mark, claimed, "c", actor="dispatcher")


def test_a_revoked_job_that_waits_is_cancelled_and_the_workers_are_told(
    outbox, recorded, broadcasts
):
    task = add_task(outbox.app)
    one, two, three = (task.apply_async(task_id=name) for name in ("one", "two", "three"))
    answer = outbox.app.control.revoke(["one", "two", "no job", 5, None])
    assert answer == [{"worker": {"ok": []}}]
    three.revoke()
    assert [recorded.job(each.id).state for each in (one, two, three)] == [State.CANCELLED] * 3
    assert recorded.messages() == []
    assert recorded.events("one") == ["recorded", "cancelled"]
    assert [arguments["task_id"] for _, arguments in broadcasts] == [
        ["one", "two", "no job", 5, None],
        "three",
    ]


def test_results_of_groups_and_by_id_revoke_too(outbox, recorded, broadcasts):
    task = add_task(outbox.app)
    jobs = [task.s().set(task_id=name) for name in ("one", "two")]
    results = [each.apply_async() for each in jobs]
    GroupResult("group", results, app=outbox.app).revoke()
    task.apply_async(task_id="three")
    AsyncResult("three", app=outbox.app).revoke(terminate=True)
    task.apply_async(task_id="four")
    outbox.app.control.terminate("four")
    task.apply_async(task_id="five")
    # As `celery control revoke five` does.
    outbox.app.control.broadcast("revoke", arguments={"task_id": ["five"]}, reply=True)
    states = {recorded.job(name).state for name in ("one", "two", "three", "four", "five")}
    assert states == {State.CANCELLED}
    assert len(broadcasts) == 4


def test_a_job_that_was_published_is_cancelled_and_its_message_runs_nothing(
    outbox, recorded, broadcasts
):
    runs, revoked = [], []

    def body():
        runs.append(1)

    def on_revoked(sender, request, terminated, expired, **_):
        revoked.append((request.id, terminated, expired))

    task = add_task(outbox.app, body)
    job_id = task.delay().id
    published(recorded)
    outbox.app.control.revoke(job_id)
    signals.task_revoked.connect(on_revoked)
    try:
        assert deliver(task, job_id) == "IGNORED"
    finally:
        signals.task_revoked.disconnect(on_revoked)
    assert runs == []
    assert revoked == [(job_id, False, False)]
    assert recorded.job(job_id).state is State.CANCELLED


def test_the_result_of_a_job_that_no_worker_will_meet_says_that_it_was_revoked(
    sqlite_installed_url, broadcasts
):
    with open_outbox(sqlite_installed_url, init=False, result_backend="cache+memory://") as outbox:
        result = add_task(outbox.app).delay()
        result.revoke()
        assert result.state == "REVOKED"


@pytest.mark.usefixtures("broker_down")
def test_without_a_broker_a_waiting_job_is_cancelled_and_nothing_else_is_hidden(outbox, recorded):
    task = add_task(outbox.app)
    task.apply_async(task_id="waits")
    outbox.app.control.revoke("waits")
    assert recorded.job("waits").state is State.CANCELLED
    # It has ended: there is nothing that the workers could do.
    outbox.app.control.revoke("waits")
    running = recorded.put(State.RUNNING)
    task.apply_async(task_id="also")
    for ids in (running.id, "no job", [running.id, "also"]):
        with pytest.raises(OperationalError):
            outbox.app.control.revoke(ids)
    assert recorded.job(running.id).state is State.RUNNING
    assert recorded.job("also").state is State.CANCELLED


def test_a_broker_that_nobody_reaches_does_not_keep_a_job_from_being_cancelled(
    sqlite_installed_url,
):
    # Once: Celery tries for some seconds to connect.
    with open_outbox(sqlite_installed_url, init=False) as outbox:
        job_id = add_task(outbox.app).delay().id
        outbox.app.control.revoke(job_id)
        assert outbox.job(job_id).state == "cancelled"


def test_a_revoke_for_one_worker_is_left_to_it(outbox, recorded, broadcasts):
    job_id = add_task(outbox.app).delay().id
    outbox.app.control.revoke(job_id, destination=["one@host"])
    assert recorded.job(job_id).state is State.QUEUED
    assert len(broadcasts) == 1


@pytest.fixture
def reached(outbox: Outbox) -> Callable[[str], str]:
    """Says what the result backend has of a job."""
    outbox.app.conf.result_backend = "cache+memory://"

    def state(job_id: str) -> str:
        return outbox.app.backend.get_task_meta(job_id)["status"]

    return state


@contextmanager
def transaction_of(outbox: Outbox, way: str) -> Iterator[Any]:
    """A transaction that is the caller's, in each way in which it can be; yields its end."""
    if way == "configured":
        scoped = scoped_session(sessionmaker(outbox.engine))
        Outbox(outbox.app, engine=outbox.engine, session=scoped)
        scoped.connection()
        yield scoped
        scoped.remove()
    elif way == "connection":
        with outbox.engine.connect() as connection, outbox.use(connection):
            yield connection
    else:
        with Session(outbox.engine) as session, outbox.use(session):
            yield session


@pytest.mark.parametrize("way", ["session", "connection", "configured"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_revoke_is_told_after_the_callers_commit_and_only_then(
    outbox, recorded, broadcasts, reached, way, end
):
    job_id = add_task(outbox.app).apply_async(task_id=str(uuid.uuid4())).id
    with transaction_of(outbox, way) as owner:
        assert outbox.app.control.revoke(job_id) is None
        assert (broadcasts, reached(job_id)) == ([], "PENDING")
        getattr(owner, end)()
        told = [arguments["task_id"] for _, arguments in broadcasts]
        if end == "commit":
            assert (told, reached(job_id)) == ([[job_id]], "REVOKED")
            assert recorded.job(job_id).state is State.CANCELLED
        else:
            assert (told, reached(job_id)) == ([], "PENDING")
            assert recorded.job(job_id).state is State.QUEUED


def test_a_revoke_shares_the_fate_of_its_savepoint(outbox, recorded, broadcasts, reached):
    task = add_task(outbox.app)
    undone, kept = (task.apply_async(task_id=f"{way}-{uuid.uuid4()}").id for way in "uk")
    with Session(outbox.engine) as session, outbox.use(session):
        with session.begin_nested() as savepoint:
            outbox.app.control.revoke(undone)
            savepoint.rollback()
        with session.begin_nested():
            outbox.app.control.revoke(kept)
        assert broadcasts == []
        session.commit()
    assert [arguments["task_id"] for _, arguments in broadcasts] == [[kept]]
    assert (reached(undone), reached(kept)) == ("PENDING", "REVOKED")
    assert (recorded.job(undone).state, recorded.job(kept).state) == ("queued", "cancelled")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_chord_hears_of_a_revoked_member_after_the_commit(shop, broadcasts, end):
    chord([shop.part.s(1)] * 2)(shop.body.s().on_error(shop.errback.s()))
    first, second = shop.waiting("shop.part")
    deliver(shop.part, first)
    with Session(shop.outbox.engine) as session, shop.outbox.use(session):
        shop.outbox.app.control.revoke(second)
        getattr(session, end)()
    assert len(shop.waiting("shop.errback")) == (1 if end == "commit" else 0)
    assert [state for state, *_ in shop.chords()] == ["failed" if end == "commit" else "open"]


def test_what_the_transaction_has_no_say_in_is_told_at_once(outbox, recorded, broadcasts):
    waits = add_task(outbox.app).delay().id
    runs = recorded.put(State.RUNNING).id
    with Session(outbox.engine) as session, outbox.use(session):
        replies = outbox.app.control.revoke(["no job", waits, runs], reply=True)
        assert replies == [{"worker": {"ok": []}}]
        assert outbox.app.control.revoke(runs, terminate=True, reply=True) == replies
        assert [arguments["task_id"] for _, arguments in broadcasts] == [["no job", runs], runs]
        session.commit()
    assert [arguments["task_id"] for _, arguments in broadcasts[2:]] == [[waits]]


def test_no_worker_answers_before_the_commit(outbox, broadcasts):
    waits = add_task(outbox.app).delay().id
    with Session(outbox.engine) as session, outbox.use(session):
        assert outbox.app.control.revoke(waits, reply=True) == []
        session.rollback()
    assert broadcasts == []
    assert outbox.app.control.revoke(waits, reply=True) == [{"worker": {"ok": []}}]


def test_a_job_that_runs_is_not_locked_by_a_revoke(outbox, recorded, broadcasts):
    runs = recorded.put(State.RUNNING).id
    with Session(outbox.engine) as session, outbox.use(session):
        outbox.app.control.revoke(runs, terminate=True)
        # As the worker does that is told.
        end_revoked(outbox.guard, runs)
        session.rollback()
    assert recorded.events(runs) == ["recorded", "claimed"]


@pytest.mark.usefixtures("broker_down")
def test_a_broker_that_is_away_keeps_no_cancelled_job_from_the_result_backend(
    outbox, recorded, reached
):
    waits = add_task(outbox.app).apply_async(task_id=str(uuid.uuid4())).id
    with pytest.raises(OperationalError):
        outbox.app.control.revoke([waits, "no job"])
    assert reached(waits) == "REVOKED"


def test_other_commands_pass(outbox, recorded, broadcasts):
    job_id = add_task(outbox.app).apply_async(stamped_headers=["x"], x="1").id
    outbox.app.control.rate_limit("shop.export", "1/m")
    assert outbox.app.control.ping() == [{"worker": {"ok": []}}]
    outbox.app.control.revoke_by_stamped_headers({"x": "1"})
    assert [command for command, _ in broadcasts] == [
        "rate_limit",
        "ping",
        "revoke_by_stamped_headers",
    ]
    assert recorded.job(job_id).state is State.QUEUED


def test_without_a_database_the_workers_are_told_and_the_error_is_not_hidden(broadcasts):
    app = make_app()
    Outbox(app)
    with pytest.raises(ConfigurationError, match="no database is configured"):
        app.control.revoke("job-1")
    assert len(broadcasts) == 1


def test_a_revoke_belongs_to_the_transaction_that_the_call_belongs_to(outbox, recorded, broadcasts):
    task = add_task(outbox.app)
    with Session(outbox.engine) as session, outbox.use(session):
        task.apply_async(task_id="both").revoke()
        session.commit()
        task.apply_async(task_id="kept")
        session.commit()
        outbox.app.control.revoke("kept")
        session.rollback()
    assert recorded.job("both").state is State.CANCELLED
    assert recorded.job("kept").state is State.QUEUED


@pytest.mark.parametrize("way", ["own", "session", "use", "connection", "scoped"])
def test_a_job_is_cancelled_in_the_callers_transaction(installed_url, way):
    with open_outbox(installed_url, init=False) as plain:
        scoped = scoped_session(sessionmaker(plain.engine))
        outbox = (
            plain if way != "scoped" else Outbox(plain.app, engine=plain.engine, session=scoped)
        )
        recorded = Database(outbox.engine, outbox.tables)
        task = add_task(outbox.app)
        if way == "own":
            job_id = task.delay().id
            outbox.cancel(job_id)
            assert recorded.job(job_id).state is State.CANCELLED
            return
        for commits in (True, False):
            job_id = recorded.put(State.QUEUED).id
            owner = scoped() if way == "scoped" else Session(outbox.engine)
            if way == "connection":
                owner = outbox.engine.connect()
            owner.begin()
            if way == "use":
                with outbox.use(owner):
                    outbox.cancel(job_id)
            elif way == "scoped":
                owner.connection()
                outbox.cancel(job_id)
            else:
                outbox.cancel(job_id, session=owner)
            if commits:
                owner.commit()
            else:
                owner.rollback()
            owner.close()
            expected = State.CANCELLED if commits else State.QUEUED
            assert recorded.job(job_id).state is expected
            assert len(recorded.messages(job_id)) == (0 if commits else 1)
        scoped.remove()


def test_what_runs_or_is_unknown_is_not_cancelled(outbox, recorded):
    running, done = recorded.put(State.RUNNING), recorded.put(State.SUCCEEDED)
    for job in (running, done):
        with pytest.raises(WrongState):
            outbox.cancel(job.id)
    with pytest.raises(UnknownJob):
        outbox.cancel("no job")


def test_a_control_class_of_the_apps_own_revokes_durably_too(sqlite_installed_url, broadcasts):
    class Own(Control):
        def ours(self):
            return "ours"

    app = Celery(
        "own",
        control=Own,
        task_cls="celery_outbox:OutboxTask",
        broker="memory://",
        set_as_current=False,
    )
    app.conf.outbox_database_url = sqlite_installed_url
    before = app.control
    first = Outbox(app)
    outbox = Outbox(app)
    assert app.control is before
    task = add_task(app)
    for _ in range(2):
        job_id = task.delay().id
        app.control.revoke(job_id)
        assert outbox.job(job_id).state == "cancelled"
        assert app.control.ours() == "ours"
        # The second one is made by the app.
        app.__dict__.pop("control")
    assert isinstance(make_and_bind(sqlite_installed_url).control, OutboxControl)
    first.engine.dispose()
    outbox.engine.dispose()


def make_and_bind(url: str) -> Celery:
    """Return an app whose control is Celery's own class."""
    app = make_app(outbox_database_url=url)
    Outbox(app)
    return app


def test_a_group_that_was_revoked_before_it_was_published_runs_nothing(
    outbox, recorded, broadcasts
):
    task = add_task(outbox.app)
    outbox.app.conf.result_backend = "cache+memory://"
    result = group(task.s(), task.s()).delay()
    result.revoke()
    assert [recorded.job(each.id).state for each in result.results] == [State.CANCELLED] * 2
    assert recorded.messages() == []
