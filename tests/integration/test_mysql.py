"""What only MariaDB and MySQL do, or have to be told."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Connection, create_engine, inspect, text, update
from sqlalchemy.exc import DataError, DBAPIError, OperationalError
from sqlalchemy.orm import Session

from celery_outbox import JobIdTaken, Outbox, TooLargeForDatabase
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.store import dialects, install, messages, recording
from celery_outbox.store import job as jobs
from celery_outbox.store.engine import transactional
from celery_outbox.store.rerun import is_transient, retry_transaction
from tests.factories import (
    Database,
    add_task,
    make_app,
    new_job,
    open_database,
    open_outbox,
)
from tests.servers.mariadb import Mariadb
from tests.wait import eventually


@pytest.fixture
def installed_url(mariadb_installed_url: str) -> str:
    return mariadb_installed_url


@pytest.fixture
def narrow(mariadb_server: Mariadb, database: Database) -> Iterator[int]:
    """A server that takes a megabyte in one statement, from connections that are opened now."""
    before = mariadb_server.set_global("max_allowed_packet", 1024 * 1024)
    database.engine.dispose()
    yield 1024 * 1024
    mariadb_server.set_global("max_allowed_packet", before)


@pytest.mark.parametrize(
    "other", ["EXPORT-42", "export-42 ", "expört-42", "export-\U0001f600", "export-\U0001f601"]
)
def test_ids_are_the_same_only_when_every_character_is(database: Database, other):
    for job_id in ("export-42", "export-\U0001f600"):
        database.put(State.QUEUED, job_id=job_id)
    is_new = other != "export-\U0001f600"
    assert database.do(recording.record, new_job(other), actor="caller") is is_new
    assert database.job(other).id == other
    assert database.job("export-42").id == "export-42"
    assert database.counts()[0] == 2 + is_new


def test_the_tables_do_not_depend_on_the_defaults_of_the_server(database: Database):
    with database.engine.connect() as connection:
        options = inspect(connection).get_table_options("outbox_job")
        columns = connection.execute(
            text(
                "SELECT column_name, character_set_name, collation_name"
                " FROM information_schema.columns WHERE table_schema = DATABASE()"
                " AND table_name LIKE 'outbox%' AND character_set_name IS NOT NULL"
            )
        ).all()
    assert {value for name, value in options.items() if name.endswith("_engine")} == {"InnoDB"}
    assert len(columns) > 15
    assert {row[1] for row in columns} == {"utf8mb4"}
    assert all(row[2].endswith("_bin") for row in columns)


def test_what_is_too_long_is_an_error_and_not_cut(database: Database):
    with pytest.raises(DataError):
        database.do(recording.record, new_job("j" * 256), actor="caller")
    assert database.counts() == (0, 0, 0)


def test_our_transactions_see_what_is_committed_whatever_the_owner_of_the_engine_chose(
    mariadb_installed_url: str, database: Database
):
    theirs = create_engine(mariadb_installed_url, isolation_level="REPEATABLE READ")
    automatic = create_engine(mariadb_installed_url, isolation_level="AUTOCOMMIT")
    try:
        for engine in (transactional(theirs), transactional(automatic), database.engine):
            with engine.connect() as connection:
                assert connection.get_isolation_level() == "READ COMMITTED"
        with theirs.connect() as connection:
            assert connection.get_isolation_level() == "REPEATABLE READ"
    finally:
        theirs.dispose()
        automatic.dispose()


def test_a_caller_with_an_old_snapshot_finds_the_first_job_of_an_id(
    mariadb_installed_url: str, outbox: Outbox, database: Database
):
    export, other = add_task(outbox.app), add_task(outbox.app, name="shop.other")
    engine = create_engine(mariadb_installed_url, isolation_level="REPEATABLE READ")
    try:
        with Session(engine) as session:
            assert session.execute(text("SELECT COUNT(*) FROM outbox_job")).scalar() == 0
            database.put(State.QUEUED, job_id="export-42")
            assert export.apply_async(task_id="export-42", session=session).id == "export-42"
            with pytest.raises(JobIdTaken):
                other.apply_async(task_id="export-42", session=session)
            # A duplicate does not end the caller's transaction.
            export.apply_async(task_id="export-43", session=session)
            session.commit()
    finally:
        engine.dispose()
    assert database.counts() == (2, 2, 2)


def test_many_rows_are_inserted_beside_an_old_snapshot(
    mariadb_installed_url: str, database: Database
):
    def rows(*names: str) -> list[dict[str, object]]:
        return [{"id": name, "hostname": "h", "pid": 1} for name in names]

    engine = create_engine(mariadb_installed_url, isolation_level="REPEATABLE READ")
    table = database.tables.worker
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT COUNT(*) FROM outbox_worker"))
            database.do(lambda c, t: dialects.insert_absent(c, t.worker, rows("w-1")))
            added = dialects.insert_absent(connection, table, rows("w-1", "w-2", "w-3"))
            assert added == {"w-2", "w-3"}
    finally:
        engine.dispose()


def test_a_deadlock_is_run_again_and_committed_once(database: Database):
    for job_id in ("a", "b"):
        database.put(State.QUEUED, job_id=job_id)
    first_steps = threading.Barrier(2)
    runs: list[str] = []

    def lock_both(one: str, two: str) -> None:
        def work(connection: Connection) -> None:
            runs.append(one)
            jobs.lock(connection, database.tables, one)
            if len(runs) <= 2:
                first_steps.wait(30)
            jobs.lock(connection, database.tables, two)
            connection.execute(
                update(database.tables.job).values(deliveries=database.tables.job.c.deliveries + 1)
            )

        retry_transaction(database.engine, work)

    threads = [threading.Thread(target=lock_both, args=pair) for pair in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(runs) == 3
    assert [database.job(job_id).deliveries for job_id in ("a", "b")] == [2, 2]


def test_a_lock_that_is_not_had_in_time_is_tried_again(database: Database):
    database.put(State.QUEUED, job_id="a")
    runs: list[int] = []
    holder = database.engine.connect()
    jobs.lock(holder, database.tables, "a")

    def work(connection: Connection) -> None:
        runs.append(1)
        database.wait_for_locks(connection, 1)
        if len(runs) == 2:
            holder.rollback()
        jobs.lock(connection, database.tables, "a")

    retry_transaction(database.engine, work)
    holder.close()
    assert len(runs) == 2


def test_a_connection_that_the_server_ended_is_replaced(
    database: Database, mariadb_server: Mariadb
):
    database.put(State.QUEUED, job_id="a")
    with database.engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        assert mariadb_server.kill_connections(database.engine.url.database or "") >= 1
        with pytest.raises(OperationalError) as caught:
            connection.execute(text("SELECT 1"))
    assert caught.value.connection_invalidated
    assert is_transient(caught.value)
    # Those in the pool are gone as well, and nobody has noticed yet.
    assert database.job("a").state is State.QUEUED


@pytest.mark.parametrize(
    ("statement", "passes"),
    [
        ("SELECT * FROM no_such_table", False),
        ("SELECT no_such_column FROM outbox_job", False),
        ("SELEKT 1", False),
        ("INSERT INTO outbox_lock (name, held_by) VALUES ('x', 'y')", False),
        ("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213", True),
        ("SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1205", True),
        ("SIGNAL SQLSTATE '08004' SET MYSQL_ERRNO = 1040", True),
        ("SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290", True),
    ],
)
def test_an_error_that_may_pass_is_told_from_one_that_does_not(database, statement, passes):
    with database.engine.connect() as connection, pytest.raises(DBAPIError) as caught:
        connection.exec_driver_sql(statement)
    assert is_transient(caught.value) is passes


def test_a_server_that_cannot_be_reached_may_come_back():
    url = "mysql+pymysql://shop:s3cret@127.0.0.1:1/shop"
    with open_outbox(url, init=False) as outbox, pytest.raises(OperationalError) as caught:
        add_task(outbox.app).delay()
    assert is_transient(caught.value)
    assert "s3cret" not in str(caught.value)


def test_a_call_that_the_server_would_not_take_is_refused_before_it_is_sent(
    outbox: Outbox, database: Database, narrow: int
):
    export = add_task(outbox.app)
    with Session(outbox.engine) as session, outbox.use(session):
        # The driver makes two bytes of each.
        with pytest.raises(TooLargeForDatabase, match=r"12\d{5} bytes.*1048576.*max_allowed"):
            export.delay("x" * 600_000)
        export.delay("x" * 510_000)
        session.commit()
    assert database.counts() == (1, 1, 1)


def test_a_message_that_the_server_would_not_take_is_set_aside_without_its_body(
    database: Database, narrow: int
):
    for body in (b"x" * 2_000_000, b"x"):
        new = new_job(f"alien-{len(body)}", body=body)
        assert database.do(
            recording.record_quarantined,
            new,
            reason=Reason.UNDECODABLE,
            actor="worker",
            copy=False,
        )
    assert database.job("alien-2000000").body is None
    assert database.job("alien-1").body == b"x"


def test_a_claim_locks_the_messages_alone(database: Database):
    database.put(State.QUEUED, job_id="a")
    with database.engine.begin() as claiming, database.engine.begin() as other:
        [message] = messages.claim(claiming, database.tables, claim="c", lease=60, limit=10)
        database.wait_for_locks(other, 1)
        assert jobs.lock(other, database.tables, message.job_id) is not None


def test_init_makes_the_indexes_that_one_who_was_killed_did_not(mariadb_url: str):
    with open_database(mariadb_url) as database:
        before = _indexes(database)
        database.execute("DROP INDEX ix_outbox_message_due ON outbox_message")
        database.execute("DELETE FROM outbox_version")
        assert database.do(install.install) is False
        assert _indexes(database) == before
        assert before["outbox_message"]["ix_outbox_message_due"] == [
            "published_at",
            "due_at",
            "id",
        ]
        assert database.put(State.SUCCEEDED).state is State.SUCCEEDED


def test_the_lock_of_init_is_given_back(mariadb_url: str, database: Database):
    with open_database(mariadb_url) as other:
        name = f"outbox:{other.engine.url.database}"
        with database.engine.connect() as connection:
            assert connection.scalar(text("SELECT IS_FREE_LOCK(:name)"), {"name": name}) == 1


def test_the_tables_live_in_another_database_that_is_made_for_them(
    mariadb_url: str, mariadb_server: Mariadb
):
    name = f"outbox_test_{os.getpid()}_jobs"
    try:
        with open_outbox(mariadb_url, outbox_schema=name) as outbox:
            result = add_task(outbox.app).delay()
            database = Database(outbox.engine, outbox.tables)
            assert database.job(result.id).state is State.QUEUED
            assert len(database.do(messages.claim, claim="c", lease=60, limit=10)) == 1
        with open_database(mariadb_url, init=False) as default, default.engine.connect() as there:
            assert inspect(there).get_table_names() == []
    finally:
        mariadb_server.drop_database(name)


def test_a_forked_process_does_not_speak_on_its_parents_connection(outbox: Outbox):
    app = make_app()
    again = Outbox(app, engine=outbox.engine)
    export = add_task(app)
    with again.engine.connect() as held:
        number = held.scalar(text("SELECT CONNECTION_ID()"))
        child = multiprocessing.get_context("fork").Process(target=_record, args=(export.delay,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert held.scalar(text("SELECT CONNECTION_ID()")) == number
    eventually(lambda: Database(outbox.engine, outbox.tables).counts() == (1, 1, 1))


def _record(delay: Callable[[], object]) -> None:
    delay()


def _indexes(database: Database) -> dict[str, dict[str, list[str]]]:
    with database.engine.connect() as connection:
        inspector = inspect(connection)
        return {
            name: {each["name"]: each["column_names"] for each in inspector.get_indexes(name)}
            for name in inspector.get_table_names()
        }
