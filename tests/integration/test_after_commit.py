"""What waits for the commit of somebody else's transaction is done after it, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from celery_outbox.core.states import State
from celery_outbox.store import job as jobs
from celery_outbox.store import transitions
from celery_outbox.store.after_commit import after_commit
from celery_outbox.store.engine import begin_immediate, open_engine


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = open_engine(request.getfixturevalue(f"{request.param}_installed_url"))
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection in whose transaction nothing has happened yet."""
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def done() -> list[Any]:
    return []


def begin(connection: Connection) -> None:
    connection.execute(text("SELECT 1"))


def test_it_is_done_once(connection, done):
    begin(connection)
    after_commit(connection, lambda: done.append(1))
    begin(connection)
    assert done == []
    connection.commit()
    assert done == [1]
    begin(connection)
    connection.commit()
    assert done == [1]


def test_what_was_written_is_committed_then_and_keeps_nobody_from_writing(database, done):
    database.put(State.QUEUED, job_id="job-1")

    def work() -> None:
        done.append(database.job("job-1").state)
        database.put(State.QUEUED, job_id="job-2")

    with database.engine.connect() as connection:
        job = jobs.lock(connection, database.tables, "job-1")
        transitions.cancel(connection, database.tables, job, actor="person")
        after_commit(connection, work)
        connection.commit()
    assert done == [State.CANCELLED]


def test_after_a_rollback_it_is_forgotten(connection, done):
    begin(connection)
    after_commit(connection, lambda: done.append(1))
    connection.rollback()
    begin(connection)
    connection.commit()
    assert done == []


def test_a_closed_connection_has_committed_nothing(engine, done):
    with engine.connect() as connection:
        begin(connection)
        after_commit(connection, lambda: done.append(1))
    with engine.connect() as connection:
        begin(connection)
        connection.commit()
    assert done == []


def test_it_shares_the_fate_of_its_savepoint(connection, done):
    connection.begin()
    kept, undone, inner = (lambda name=name: done.append(name) for name in ("kept", "undone", "in"))
    after_commit(connection, kept)
    with connection.begin_nested() as savepoint:
        after_commit(connection, undone)
        with connection.begin_nested():
            after_commit(connection, inner)
        savepoint.rollback()
    with connection.begin_nested():
        after_commit(connection, inner)
    assert done == []
    connection.commit()
    assert done == ["kept", "in"]


def test_a_savepoint_from_before_the_first_work_counts_too(connection, done):
    connection.begin()
    with connection.begin_nested() as outer:
        with connection.begin_nested():
            after_commit(connection, lambda: done.append(1))
        outer.rollback()
    connection.commit()
    with connection.begin(), connection.begin_nested():
        after_commit(connection, lambda: done.append(2))
    assert done == [2]


def test_savepoints_and_ends_in_plain_sql_count_too(connection, done):
    connection.begin()
    begin_immediate(connection)
    for name in ("a", "B"):
        connection.execute(text(f"SAVEPOINT {name}"))
        after_commit(connection, lambda name=name: done.append(name))
    connection.execute(text("/* undo */ rollback to savepoint b"))
    after_commit(connection, lambda: done.append("after"))
    connection.execute(text("RELEASE SAVEPOINT a"))
    connection.execute(text("COMMIT"))
    assert done == ["a", "after"]
    connection.execute(text("SELECT 1" if connection.dialect.name == "postgresql" else "BEGIN"))
    after_commit(connection, lambda: done.append("never"))
    connection.execute(text("ROLLBACK"))
    connection.commit()
    assert done == ["a", "after"]


def test_a_session_commits_by_its_root_transaction(engine, done):
    with Session(engine) as session:
        with session.begin_nested():
            after_commit(session.connection(), lambda: done.append(1))
        assert done == []
        session.commit()
        assert done == [1]
    with engine.connect() as outer, outer.begin() as transaction:
        with Session(outer, join_transaction_mode="rollback_only") as session:
            after_commit(session.connection(), lambda: done.append(2))
            session.commit()
        assert done == [1]
        transaction.commit()
    assert done == [1, 2]


def test_in_autocommit_it_is_done_at_once(engine, done):
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
        begin(connection)
        after_commit(connection, lambda: done.append(1))
        assert done == [1]


def test_an_error_of_one_is_logged_and_the_next_is_done(connection, done, caplog):
    def fail() -> None:
        raise ValueError

    begin(connection)
    after_commit(connection, fail)
    after_commit(connection, lambda: done.append(1))
    connection.commit()
    assert done == [1]
    assert "outbox.after_commit_failed" in caplog.text


@contextmanager
def failing_commits(engine: Engine) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise OperationalError("COMMIT", {}, Exception("gone"))

    engine.dialect.do_commit = fail  # type: ignore[method-assign]
    yield
    del engine.dialect.do_commit


def test_a_commit_that_fails_is_none(engine, connection, done):
    begin(connection)
    after_commit(connection, lambda: done.append(1))
    with failing_commits(engine), pytest.raises(OperationalError):
        connection.commit()
    connection.rollback()
    begin(connection)
    connection.commit()
    assert done == []


@pytest.mark.parametrize("engine", ["postgresql", "mariadb"], indirect=True)
@pytest.mark.parametrize("prepared", [True, False])
def test_a_commit_in_two_phases_is_one(engine, done, prepared):
    for end in ("commit", "rollback"):
        with engine.connect() as connection:
            transaction = connection.begin_twophase()
            begin(connection)
            after_commit(connection, lambda end=end: done.append(end))
            if prepared:
                transaction.prepare()
            assert "rollback" not in done
            getattr(transaction, end)()
    assert done == ["commit"]
