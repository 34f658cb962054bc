"""Transactional bodies: what they write, what they enqueue and their success are one commit."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, registry, scoped_session, sessionmaker

from celery_outbox import (
    ConfigurationError,
    FileStore,
    LeaseLost,
    NotInJob,
    Outbox,
    PermanentError,
    RetryPolicy,
    TransactionOver,
)
from celery_outbox.execute.transaction import BodyTransaction
from celery_outbox.store.engine import open_engine
from tests.factories import Database, make_app, open_outbox, return_nothing
from tests.integration.delivering import add_task, again, deliver

#: What Celery says when its own part of a delivery fails, as some of these tests make it.
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body:RuntimeWarning")

AT_ONCE = RetryPolicy(3, delay=0.0)

payments = Table(
    "payments",
    MetaData(),
    Column("id", Integer, primary_key=True),
    Column("job", String(255), unique=True),
)


@registry().mapped
class Payment:
    """A row of it."""

    __table__ = payments


@pytest.fixture(autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """The application's own table, beside the outbox's."""
    only = "postgresql_installed_url" if "installed_url" not in request.fixturenames else ""
    with open_outbox(request.getfixturevalue(only or "installed_url"), init=False) as outbox:
        payments.metadata.create_all(outbox.engine)
        yield
        payments.metadata.drop_all(outbox.engine)


@pytest.fixture
def outbox(outbox: Outbox) -> Outbox:
    """An outbox whose results of Celery's own are kept in memory."""
    outbox.app.conf.result_backend = "cache+memory://"
    return outbox


@pytest.fixture
def letter(outbox: Outbox) -> Any:
    """A task that bodies enqueue."""
    return add_task(outbox.app, name="shop.letter")


def paid(outbox: Outbox) -> int:
    """How many payments are committed."""
    with outbox.engine.connect() as connection:
        return int(connection.scalar(select(func.count()).select_from(payments)) or 0)


def pay(self: Any) -> str:
    """The body that most tests are about."""
    self.session.execute(insert(payments).values(job=self.request.id))
    self.app.tasks["shop.letter"].apply_async(task_id=f"letter-{self.request.id}")
    return "paid"


def transactional(outbox: Outbox, body: Any, **options: Any) -> Any:
    options = {"bind": True, "transactional": True, "retry_policy": AT_ONCE, **options}
    return add_task(outbox.app, body, **options)


def lose_the_lease(recorded: Database, session: Session | Database, job_id: str) -> None:
    """What maintenance does when a worker was silent, and the next attempt begins."""
    job = recorded.tables.job
    stolen = job.update().where(job.c.id == job_id).values(lease_token=job.c.lease_token + 1)
    if recorded.engine.dialect.name == "sqlite":
        # Nobody else can write while the body does.
        session.execute(stolen)
    else:
        recorded.execute(stolen)


def test_writes_enqueued_jobs_and_success_are_committed_together(outbox, recorded, letter):
    def look_while_it_runs(self: Any) -> str:
        done = pay(self)
        with outbox.engine.connect() as connection:
            ids = set(connection.scalars(select(recorded.tables.job.c.id)))
        assert ids == {"job-1"}
        return done

    task = transactional(outbox, look_while_it_runs)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    job = recorded.job("job-1")
    assert (job.state, json.loads(job.result), job.attempt) == ("succeeded", "paid", 1)
    assert (paid(outbox), recorded.job("letter-job-1").state) == (1, "queued")
    assert recorded.events("job-1") == ["recorded", "claimed", "succeeded"]


def test_one_transaction_holds_it_all(outbox, recorded, letter):
    task = transactional(outbox, pay)
    task.apply_async(task_id="job-1")
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        # Several of them in one statement, where the database does that.
        for word, table in re.findall(r"(INSERT INTO|UPDATE) (\w+)", statement):
            if table in ("payments", "outbox_job", "outbox_message"):
                seen.append(f"{word.split()[0]} {table}")

    event.listen(outbox.engine, "before_cursor_execute", note)
    event.listen(outbox.engine, "commit", lambda connection: seen.append("COMMIT"))
    deliver(task, "job-1")
    claim = ["UPDATE outbox_job"]
    if outbox.engine.dialect.name != "postgresql":
        claim.append("COMMIT")
    assert seen == [
        *claim,
        "INSERT payments",
        "INSERT outbox_job",
        "INSERT outbox_message",
        "UPDATE outbox_job",
        "COMMIT",
    ]


@pytest.mark.parametrize("error", [ConnectionError(), PermanentError(), Reject(requeue=False)])
def test_a_failure_leaves_nothing_but_the_failure(outbox, recorded, letter, error):
    def body(self: Any) -> None:
        pay(self)
        raise error

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    expected = "retrying" if isinstance(error, ConnectionError) else "quarantined"
    assert recorded.job("job-1").state == expected
    assert paid(outbox) == 0
    assert len(recorded.messages("letter-job-1", pending=False)) == 0


def test_a_stale_attempt_commits_nothing(outbox, recorded, letter):
    def body(self: Any) -> str:
        pay(self)
        lose_the_lease(recorded, self.session, "job-1")
        return "late"

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    assert (recorded.job("job-1").state, recorded.job("job-1").result) == ("running", None)
    assert (paid(outbox), recorded.messages("letter-job-1")) == (0, [])
    assert recorded.events("job-1") == ["recorded", "claimed", "stale"]


def test_a_stale_block_raises_a_clear_error_into_the_body(outbox, recorded, letter):
    errors: list[Exception] = []

    def body(self: Any) -> str:
        try:
            lose_the_lease(recorded, recorded, "job-1")
            with self.transaction() as session:
                session.execute(insert(payments).values(job="job-1"))
        except LeaseLost as error:
            errors.append(error)
        return "late"

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    assert "job 'job-1' has lost its lease" in str(errors[0])
    assert (paid(outbox), recorded.job("job-1").state) == (0, "running")


def test_a_constraint_that_fails_at_the_commit_is_a_failure_like_any_other(
    outbox, recorded, letter
):
    def body(self: Any) -> None:
        self.session.execute(insert(payments).values(job="same"))

    task = transactional(outbox, body, retry_policy=RetryPolicy(1))
    for job_id in ("job-1", "job-2"):
        task.apply_async(task_id=job_id)
        deliver(task, job_id)
    job = recorded.job("job-2")
    assert (job.state, job.error_code) == ("quarantined", "sqlalchemy.exc.IntegrityError")
    assert paid(outbox) == 1


def test_a_body_that_commits_is_told_what_to_do_instead(outbox, recorded, letter):
    def body(self: Any) -> None:
        pay(self)
        self.session.commit()

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, paid(outbox)) == ("quarantined", 0)
    assert job.error_code == "celery_outbox.exceptions.CommitInBody"


def test_savepoints_in_the_body_work(outbox, recorded, letter):
    def body(self: Any) -> None:
        pay(self)
        with self.session.begin_nested() as savepoint:
            self.session.execute(insert(payments).values(job="undone"))
            letter.apply_async(task_id="letter-undone")
            savepoint.rollback()
        with self.session.begin_nested():
            self.session.execute(insert(payments).values(job="kept"))

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert (recorded.job("job-1").state, paid(outbox)) == ("succeeded", 2)
    assert not recorded.messages("letter-undone")


def test_a_retry_by_hand_undoes_the_attempt_and_the_next_one_commits(outbox, recorded, letter):
    def body(self: Any) -> str:
        pay(self)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return "paid"

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "RETRY"
    assert (recorded.job("job-1").state, paid(outbox)) == ("retrying", 0)
    assert deliver(task, "job-1", retries=1) == "SUCCESS"
    assert (recorded.job("job-1").attempt, paid(outbox)) == (2, 1)


def test_a_replacement_is_committed_with_what_the_body_wrote(outbox, recorded, letter):
    def body(self: Any) -> None:
        pay(self)
        raise self.replace(letter.si())

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, job.task, paid(outbox)) == ("retrying", "shop.letter", 1)
    assert recorded.job("letter-job-1").state == "queued"


def test_ignore_is_a_success_that_commits(outbox, recorded, letter):
    def body(self: Any) -> None:
        pay(self)
        raise Ignore

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "IGNORED"
    assert (recorded.job("job-1").state, paid(outbox)) == ("succeeded", 1)


def test_a_duplicate_of_a_committed_job_runs_nothing(outbox, recorded, letter):
    task = transactional(outbox, pay)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert again(task, "job-1") == "SUCCESS"
    assert (paid(outbox), recorded.job("job-1").deliveries) == (1, 2)


def test_a_file_of_an_earlier_attempt_does_not_stand_for_its_transaction(
    outbox, recorded, letter, tmp_path
):
    outbox._result_store = FileStore(tmp_path)

    def body(self: Any) -> str:
        pay(self)
        return self.write_result(f"attempt {self.request.retries}")

    task = transactional(outbox, body, result_key="{job_id}.txt")
    task.apply_async(task_id="job-1")
    FileStore(tmp_path).write("job-1.txt", "of an attempt that was killed before its commit")
    deliver(task, "job-1")
    assert (recorded.job("job-1").state, paid(outbox)) == ("succeeded", 1)
    assert "killed" in (tmp_path / "job-1.txt").read_text()


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("error", [OperationalError("", {}, OSError()), SoftTimeLimitExceeded()])
def test_an_error_at_the_commit_is_followed_by_a_look_at_the_database(
    outbox, recorded, letter, monkeypatch, committed, error
):
    commit = Session.commit

    def interrupted(session: Session) -> None:
        if committed:
            commit(session)
        raise error

    task = transactional(outbox, pay)
    task.apply_async(task_id="job-1")
    monkeypatch.setattr(Session, "commit", interrupted)
    deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, paid(outbox)) == (("succeeded", 1) if committed else ("retrying", 0))


def test_a_soft_limit_right_after_the_commit_does_not_make_it_stale(
    outbox, recorded, letter, monkeypatch
):
    commit_with = BodyTransaction.commit_with

    def interrupted(self: BodyTransaction, write: Any) -> bool:
        commit_with(self, write)
        raise SoftTimeLimitExceeded

    task = transactional(outbox, pay)
    task.apply_async(task_id="job-1", link=letter.si())
    monkeypatch.setattr(BodyTransaction, "commit_with", interrupted)
    assert deliver(task, "job-1") == "SUCCESS"
    assert recorded.events("job-1") == ["recorded", "claimed", "succeeded"]
    # The one of the body, and the callback.
    assert (paid(outbox), len(outbox.control.find(task="shop.letter"))) == (1, 2)


# -- self.transaction() ----------------------------------------------------------------


def test_a_block_ends_the_job_and_the_result_is_what_the_body_returns(outbox, recorded, letter):
    states: list[str] = []

    def body(self: Any) -> str:
        with self.transaction() as session:
            session.execute(insert(payments).values(job=self.request.id))
            letter.apply_async(task_id="letter-1")
        states.append(recorded.job("job-1").state)
        return "receipt 42"

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    assert states == ["succeeded"]
    assert (paid(outbox), recorded.job("letter-1").state) == (1, "queued")
    assert json.loads(recorded.job("job-1").result) == "receipt 42"
    assert recorded.events("job-1") == ["recorded", "claimed", "succeeded"]


def test_the_block_can_be_given_the_result(outbox, recorded):
    # Celery's memory backend is one for all tests.
    job_id = f"receipt-{uuid.uuid4()}"

    def body(self: Any) -> None:
        with self.transaction(result="receipt 42"):
            pass

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id=job_id)
    deliver(task, job_id)
    assert json.loads(recorded.job(job_id).result) == "receipt 42"
    assert outbox.app.AsyncResult(job_id).get() == "receipt 42"


def test_an_error_in_the_block_undoes_it_and_the_attempt_fails(outbox, recorded, letter):
    def body(self: Any) -> None:
        with self.transaction() as session:
            session.execute(insert(payments).values(job=self.request.id))
            raise ConnectionError

    task = add_task(outbox.app, body, bind=True, retry_policy=AT_ONCE)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert (recorded.job("job-1").state, paid(outbox)) == ("retrying", 0)


def test_an_error_after_the_block_changes_nothing(outbox, recorded, caplog):
    def body(self: Any) -> None:
        with self.transaction(result="done") as session:
            session.execute(insert(payments).values(job=self.request.id))
        raise ConnectionError

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    assert (recorded.job("job-1").state, paid(outbox)) == ("succeeded", 1)
    assert "outbox.failed_after_success" in caplog.text


def test_calls_after_the_block_belong_to_the_session_that_they_name(outbox, recorded, letter):
    def body(self: Any) -> None:
        with self.transaction():
            pass
        with Session(outbox.engine) as session, outbox.use(session):
            session.execute(insert(payments).values(job="undone"))
            letter.apply_async(task_id="undone")
            session.rollback()
            session.execute(insert(payments).values(job=self.request.id))
            letter.apply_async(task_id="kept")
            session.commit()

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    assert deliver(task, "job-1") == "SUCCESS"
    assert paid(outbox) == 1
    assert recorded.events("undone") == []
    assert recorded.job("kept").state == "queued"


def test_a_second_block_is_refused(outbox, recorded):
    errors: list[Exception] = []

    def body(self: Any) -> None:
        with self.transaction():
            pass
        try:
            with self.transaction():
                pass
        except TransactionOver as error:
            errors.append(error)

    task = add_task(outbox.app, body, bind=True)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert "ended with its first one" in str(errors[0])
    assert recorded.job("job-1").state == "succeeded"


@pytest.mark.parametrize(
    ("options", "words"),
    [({"transactional": True}, "in one already"), ({"result_key": "{job_id}"}, "its result_key")],
)
def test_a_block_where_it_cannot_hold_its_promise_is_refused(
    outbox, recorded, tmp_path, options, words
):
    outbox._result_store = FileStore(tmp_path)
    errors: list[Exception] = []

    def body(self: Any) -> None:
        try:
            with self.transaction():
                pass
        except TransactionOver as error:
            errors.append(error)
            raise

    task = add_task(outbox.app, body, bind=True, **options)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    assert words in str(errors[0])
    assert recorded.job("job-1").state == "quarantined"


# -- whose session ---------------------------------------------------------------------


def test_the_configured_session_is_the_body_s_session(installed_url, letter):
    with open_outbox(installed_url, init=False) as plain:
        current = scoped_session(sessionmaker(plain.engine))
        app = make_app(outbox_database_url=installed_url)
        outbox = Outbox(app, session=current)
        add_task(app, name="shop.letter")

        def body(self: Any) -> None:
            assert self.session is current()
            current.execute(insert(payments).values(job="job-1"))

        task = transactional(outbox, body)
        task.apply_async(task_id="job-1")
        current.commit()
        deliver(task, "job-1")
        assert (outbox.job("job-1").state, paid(outbox)) == ("succeeded", 1)
        assert not current().in_transaction()
        current.remove()
        outbox.engine.dispose()


def test_outside_a_worker_a_body_is_part_of_its_caller_s_transaction(outbox, recorded, letter):
    task = transactional(outbox, lambda self: pay(self))
    with Session(outbox.engine) as session, outbox.use(session):
        assert task.apply(task_id="job-1").get() == "paid"
        session.rollback()
    assert paid(outbox) == 0
    assert task.apply(task_id="job-1").get() == "paid"
    assert (paid(outbox), recorded.job("letter-job-1").state) == (1, "queued")


def test_without_a_transaction_there_is_no_session(outbox):
    task = add_task(outbox.app, return_nothing)
    with pytest.raises(NotInJob, match="session of a transaction"):
        _ = task.session


def test_transactional_must_be_a_truth_value(outbox):
    with pytest.raises(ConfigurationError, match="transactional of task"):
        transactional(outbox, pay, transactional="yes")


@contextmanager
def configured(url: str, engine: Engine | None = None, **options: Any) -> Iterator[tuple]:
    """An outbox with a session of the application's, and a task's two helpers."""
    with open_outbox(url, init=False) as plain:
        current = scoped_session(sessionmaker(engine or plain.engine, **options))
        app = make_app(outbox_database_url=url, result_backend="cache+memory://")
        outbox = Outbox(app, session=current)
        try:
            yield outbox, current, Database(plain.engine, plain.tables)
        finally:
            current.remove()
            outbox.engine.dispose()


def record(recorded: Database, task: Any, job_id: str) -> None:
    with recorded.engine.begin() as connection:
        task.apply_async(task_id=job_id, session=connection)


def test_a_configured_session_that_does_not_begin_by_itself_is_begun(installed_url, letter):
    with configured(installed_url, autobegin=False) as (outbox, current, recorded):
        task = transactional(
            outbox, lambda self: current.execute(insert(payments).values(job="job-1")) and None
        )
        record(recorded, task, "job-1")
        deliver(task, "job-1")
        assert (outbox.job("job-1").state, paid(outbox)) == ("succeeded", 1)


def test_a_driver_in_autocommit_is_refused_before_the_body(postgresql_installed_url):
    engine = open_engine(postgresql_installed_url)

    @event.listens_for(engine, "connect")
    def leave_transactions_alone(driver: Any, record: Any) -> None:
        driver.autocommit = True

    with configured(postgresql_installed_url, engine) as (outbox, current, recorded):
        task = transactional(
            outbox, lambda self: current.execute(insert(payments).values(job="job-1"))
        )
        record(recorded, task, "job-1")
        deliver(task, "job-1")
        job = recorded.job("job-1")
        assert (job.error_code, paid(outbox)) == ("celery_outbox.exceptions.UnusableSession", 0)
    engine.dispose()


def test_a_commit_past_the_session_is_refused_too(outbox, recorded, letter):
    def body(self: Any) -> None:
        pay(self)
        self.session.connection().commit()

    task = transactional(outbox, body)
    task.apply_async(task_id="job-1")
    deliver(task, "job-1")
    job = recorded.job("job-1")
    assert (job.state, paid(outbox)) == ("quarantined", 0)
    assert job.error_code == "celery_outbox.exceptions.CommitInBody"
    assert recorded.messages("letter-job-1") == []


def test_what_the_body_left_to_be_flushed_may_take_its_time(postgresql_installed_url):
    def body(self: Any) -> None:
        self.session.add(Payment(job="job-1"))
        event.listen(self.session, "before_flush", take_time)

    def take_time(session: Session, *rest: Any) -> None:
        session.execute(text("SELECT pg_sleep(1.5)"))

    url = postgresql_installed_url
    with open_outbox(url, init=False, outbox_database_timeout=0.5) as outbox:
        outbox.app.conf.result_backend = "cache+memory://"
        task = transactional(outbox, body, retry_policy=RetryPolicy(1))
        task.apply_async(task_id="job-1")
        deliver(task, "job-1")
        assert (outbox.job("job-1").state, paid(outbox)) == ("succeeded", 1)


def test_a_failed_body_does_not_wait_for_a_silent_database_for_ever(
    postgresql_installed_url, proxy_to
):
    proxy = proxy_to(postgresql_installed_url)
    url = proxy.url_for(postgresql_installed_url) + "?connect_timeout=2"

    def body(self: Any) -> None:
        self.session.execute(select(1))
        proxy.stall()
        raise ConnectionError

    settings = {"outbox_database_timeout": 0.5, "outbox_settle_timeout": 1.0}
    with open_outbox(url, init=False, **settings) as outbox:
        outbox.app.conf.result_backend = "cache+memory://"
        task = transactional(outbox, body)
        task.apply_async(task_id="job-1")
        assert deliver(task, "job-1") == "REJECTED"
        proxy.resume()
        assert outbox.job("job-1").state == "running"


# -- what is left open in the application's session ------------------------------------


# SQLite would not even take the end of the job that leaves it.
@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
def test_what_another_job_left_in_the_session_is_not_committed_with_the_next_one(
    installed_url, letter
):
    with configured(installed_url) as (outbox, current, recorded):

        def leave() -> None:
            current.execute(insert(payments).values(job="left"))

        def book(self: Any) -> None:
            current.execute(insert(payments).values(job="booked"))

        left = add_task(outbox.app, leave, name="shop.leave")
        booked = transactional(outbox, book, name="shop.book")
        record(recorded, left, "job-1")
        record(recorded, booked, "job-2")
        deliver(left, "job-1")
        assert not current().in_transaction()
        # Left by something that is no job of ours, before this one.
        leave()
        deliver(booked, "job-2")
        assert outbox.job("job-2").state == "succeeded"
        with recorded.engine.connect() as connection:
            assert list(connection.scalars(select(payments.c.job))) == ["booked"]


def test_a_session_that_a_job_has_only_read_in_does_not_swallow_the_next_one_s_calls(
    installed_url,
):
    with configured(installed_url) as (outbox, current, recorded):
        called = add_task(outbox.app, name="shop.letter")
        reads = add_task(outbox.app, lambda: current.scalar(select(1)), name="shop.read")
        calls = add_task(
            outbox.app, lambda: called.apply_async(task_id="letter-1").id, name="shop.call"
        )
        record(recorded, reads, "job-1")
        record(recorded, calls, "job-2")
        assert [deliver(reads, "job-1"), deliver(calls, "job-2")] == ["SUCCESS", "SUCCESS"]
        current.remove()
        assert outbox.job("letter-1").state == "queued"


def test_a_session_of_a_framework_may_be_out_of_reach_between_jobs(installed_url):
    def context() -> int:
        raise RuntimeError("Working outside of application context.")

    with open_outbox(installed_url, init=False) as plain:
        current = scoped_session(sessionmaker(plain.engine), scopefunc=context)
        app = make_app(outbox_database_url=installed_url, result_backend="cache+memory://")
        outbox = Outbox(app, session=current)
        task = add_task(app, name="shop.read")
        record(Database(plain.engine, plain.tables), task, "job-1")
        assert deliver(task, "job-1") == "SUCCESS"
        outbox.engine.dispose()
