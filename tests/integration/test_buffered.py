"""The calls of a transaction are written together, and share its fate all the same."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    ForeignKey,
    MetaData,
    Table,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session

from celery_outbox import JobIdTaken, NotWritten, Outbox, RecordError, UnserializableArgument
from celery_outbox import UnusableSession as Unusable
from celery_outbox import app as app_module
from celery_outbox.core.states import State
from celery_outbox.store.buffer import MOST_BYTES
from celery_outbox.store.calls import Call
from celery_outbox.store.dialects import TABLE_OPTIONS, Name, is_mysql
from celery_outbox.store.notification import fall_asleep, listen
from tests.factories import Database, add_task, new_job, open_outbox

NOTHING = (0, 0, 0)
ONE_JOB = (1, 1, 1)


@pytest.fixture(params=["sqlite", "psycopg2", "psycopg", "mariadb"])
def installed_url(request: pytest.FixtureRequest) -> str:
    """A database of each kind, through each driver."""
    if request.param in ("sqlite", "mariadb"):
        return request.getfixturevalue(f"{request.param}_installed_url")
    url: str = request.getfixturevalue("postgresql_installed_url")
    return url.replace("psycopg2", request.param)


@pytest.fixture
def export(outbox: Outbox) -> Any:
    return add_task(outbox.app)


@pytest.fixture
def connection(outbox: Outbox) -> Iterator[Connection]:
    with outbox.engine.connect() as connection, outbox.use(connection):
        yield connection


@pytest.fixture
def session(outbox: Outbox) -> Iterator[Session]:
    with Session(outbox.engine) as session, outbox.use(session):
        yield session


@pytest.fixture
def orders(recorded: Database, export: Any) -> Iterator[None]:
    """A table of the application's own; the outbox's have been looked for."""
    export.delay("once per engine")
    recorded.empty()
    recorded.execute("CREATE TABLE orders_of_a_test (id INTEGER)")
    yield
    recorded.execute("DROP TABLE orders_of_a_test")


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """The statements that are sent in the block."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)


def ids(recorded: Database) -> list[str]:
    """The jobs in the order in which they are published."""
    message = recorded.tables.message
    with recorded.engine.connect() as connection:
        found = select(message.c.job_id).order_by(message.c.due_at, message.c.id)
        return list(connection.scalars(found))


# -- how many statements ---------------------------------------------------------------


@pytest.mark.parametrize(("calls", "rounds"), [(1, 1), (2, 1), (1_000, 2)])
def test_the_number_of_statements_is_constant_per_thousand_calls(
    outbox, recorded, export, calls, rounds
):
    export.delay("the tables are looked for once per engine")
    recorded.empty()
    with (
        Session(outbox.engine) as session,
        outbox.use(session),
        statements(outbox.engine) as sent,
    ):
        made = [export.delay(number).id for number in range(calls)]
        session.commit()
    written = ["WITH"] if outbox.engine.dialect.name == "postgresql" else ["INSERT"] * 3
    assert [statement.split()[0] for statement in sent] == written * rounds
    assert recorded.counts() == (calls, calls, calls)
    assert ids(recorded) == made


@pytest.mark.parametrize(("end", "counts"), [("commit", (10_000,) * 3), ("rollback", NOTHING)])
def test_ten_thousand_calls_are_recorded_all_or_none(recorded_postgresql, end, counts):
    outbox, recorded = recorded_postgresql
    export = add_task(outbox.app)
    export.delay("once per engine")
    recorded.empty()
    with (
        Session(outbox.engine) as session,
        outbox.use(session),
        statements(outbox.engine) as sent,
    ):
        for number in range(10_000):
            export.delay(number)
        getattr(session, end)()
    assert len(sent) == 20
    assert recorded.counts() == counts


def test_large_calls_are_not_kept_until_they_are_many(outbox, recorded, export, session):
    with statements(outbox.engine) as sent:
        for _ in range(3):
            export.delay("x" * (MOST_BYTES // 8))
        assert not [each for each in sent if "INSERT" in each]
        for _ in range(6):
            export.delay("x" * (MOST_BYTES // 8))
        # MariaDB takes less in one statement.
        assert len([each for each in sent if "INSERT INTO outbox_message" in each]) == 1
    session.commit()
    assert recorded.counts() == (9, 9, 9)


def test_what_is_written_together_equals_what_is_written_alone(outbox, recorded, session):
    task = add_task(outbox.app, expires=600)
    job, message, line = recorded.tables.job, recorded.tables.message, recorded.tables.event
    options = {"countdown": 60, "priority": 3, "headers": {"tenant": "a"}, "queue": "reports"}

    def rows() -> list[list[Any]]:
        of_call = {"id", "envelope", "job_id"}
        times = {"recorded_at", "available_at", "expires_at", "created_at", "due_at", "at"}
        found = []
        with recorded.engine.connect() as reading:
            for table in (job, message, line):
                columns = [c for c in table.c if c.name not in of_call | times]
                found.append(sorted(map(tuple, reading.execute(select(*columns))), key=repr))
            waits = select(job.c.queue, job.c.available_at, job.c.recorded_at).order_by(job.c.queue)
            for queue, at, made in reading.execute(waits):
                found.append([queue, round((at - made).total_seconds(), -1)])
        return found

    with outbox.use(lambda: None):
        task.apply_async((1,), **options)
        task.apply_async((2,))
    alone = rows()
    recorded.empty()
    task.apply_async((1,), **options)
    task.apply_async((2,))
    session.commit()
    assert rows() == alone


def test_a_delay_counts_from_the_call(outbox, recorded):
    call = Call.of(new_job(available_at=timedelta(seconds=60)), "caller")
    made_before = Call(call.new, call.actor, time.monotonic() - 40)
    waits = made_before.due.available_at
    assert timedelta(seconds=19) < waits <= timedelta(seconds=20)
    long_ago = Call(call.new, call.actor, time.monotonic() - 400)
    assert long_ago.due.available_at == timedelta(0)


def test_what_the_caller_changes_after_the_call_does_not_count(recorded, export, session):
    headers = {"tenant": {"name": "a"}}
    first = export.apply_async((1,), headers=headers)
    export.delay(2)
    headers["tenant"]["name"] = "b"
    session.commit()
    assert recorded.job(first.id).envelope.headers["tenant"] == {"name": "a"}


@pytest.mark.parametrize(("sleeps", "notified"), [(True, 1), (False, 0)])
def test_a_dispatcher_that_sleeps_is_woken_once_at_the_commit(
    postgresql_installed_url, sleeps, notified
):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        with outbox.engine.connect() as listening, Session(outbox.engine) as session:
            driver = listening.connection.dbapi_connection
            driver.autocommit = True
            listen(driver, outbox.tables.channel)
            if sleeps:
                assert fall_asleep(driver, outbox.tables.channel)
            for number in range(3):
                export.apply_async((number,), session=session)
            outbox.write(session)
            driver.poll()
            assert driver.notifies == []
            session.commit()
            # A statement's answer comes behind the notifications that were sent before it.
            driver.cursor().execute("SELECT 1")
            driver.poll()
            assert len(driver.notifies) == notified


# -- what shares the fate of a savepoint -----------------------------------------------


def begin_nested(connection: Connection, name: str) -> Any:
    return connection.begin_nested()


class InText:
    """A savepoint that SQLAlchemy knows nothing of."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name = connection, name
        connection.execute(text(f"SAVEPOINT {name}"))

    def rollback(self) -> None:
        self.connection.execute(text(f"/* undo */ ROLLBACK TO SAVEPOINT {self.name}"))

    def commit(self) -> None:
        self.connection.execute(text(f"release savepoint {self.name}"))


@pytest.fixture(params=[begin_nested, InText], ids=["sqlalchemy", "text"])
def savepoint(request: pytest.FixtureRequest) -> Callable[[Connection, str], Any]:
    return request.param


@pytest.mark.parametrize(
    ("inner", "outer", "kept"),
    [
        ("rollback", "commit", ["before", "after"]),
        ("commit", "rollback", []),
        ("commit", "commit", ["before", "inside", "after"]),
    ],
)
def test_a_savepoint_decides_about_its_own_calls(
    recorded, export, connection, savepoint, inner, outer, kept
):
    connection.begin()
    names = {}
    names[export.delay("before").id] = "before"
    point = savepoint(connection, "one")
    names[export.delay("inside").id] = "inside"
    getattr(point, inner)()
    names[export.delay("after").id] = "after"
    getattr(connection, outer)()
    assert [names[job_id] for job_id in ids(recorded)] == kept


@pytest.mark.parametrize(
    ("inner", "outer", "counts"),
    [
        ("rollback", "commit", NOTHING),
        ("commit", "rollback", NOTHING),
        ("commit", "commit", ONE_JOB),
    ],
)
@pytest.mark.parametrize("task_id", [None, "export-42"])
def test_also_where_the_transaction_begins_with_it(
    outbox, recorded, export, inner, outer, counts, task_id
):
    with Session(outbox.engine) as session, outbox.use(session):
        point = session.begin_nested()
        export.apply_async((42,), task_id=task_id)
        getattr(point, inner)()
        getattr(session, outer)()
    assert recorded.counts() == counts


def test_savepoints_nest(recorded, export, connection, savepoint):
    connection.begin()
    kept = [export.delay(1).id]
    outer = savepoint(connection, "one")
    export.delay(2)
    inner = savepoint(connection, "two")
    export.delay(3)
    inner.commit()
    export.delay(4)
    outer.rollback()
    kept.append(export.delay(5).id)
    again = savepoint(connection, "three")
    kept.append(export.delay(6).id)
    undone = savepoint(connection, "four")
    export.delay(7)
    undone.rollback()
    kept.append(export.delay(8).id)
    again.commit()
    connection.commit()
    assert ids(recorded) == kept


def test_a_rollback_to_a_savepoint_that_is_not_there_undoes_nothing(recorded, export, connection):
    connection.begin()
    export.delay(1)
    with pytest.raises(DBAPIError):
        connection.execute(text("ROLLBACK TO SAVEPOINT nowhere"))
    if connection.dialect.name == "postgresql":
        # The transaction is aborted, and PostgreSQL would take a commit for a rollback.
        with pytest.raises(DBAPIError):
            connection.commit()
        connection.rollback()
        assert recorded.counts() == NOTHING
    else:
        connection.commit()
        assert recorded.counts() == ONE_JOB


# -- how a transaction can end ---------------------------------------------------------


def test_a_session_that_is_closed_has_recorded_nothing(outbox, recorded, export, caplog):
    with Session(outbox.engine) as session, outbox.use(session):
        export.delay(42)
    assert recorded.counts() == NOTHING
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("statement", "counts"),
    [("COMMIT", ONE_JOB), ("/* a */ commit", ONE_JOB), ("ROLLBACK", NOTHING)],
)
def test_an_end_in_text_counts(recorded, export, connection, statement, counts):
    connection.begin()
    connection.execute(text("SELECT 1"))
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")
    export.delay(42)
    connection.execute(text(statement))
    connection.rollback()
    assert recorded.counts() == counts


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("prepared", [True, False])
def test_two_phases_decide_about_the_calls(recorded_postgresql, end, prepared):
    outbox, recorded = recorded_postgresql
    export = add_task(outbox.app)
    with outbox.engine.connect() as connection, outbox.use(connection):
        transaction = connection.begin_twophase()
        export.delay(42)
        # Written at the call.
        export.apply_async((43,), task_id="export-43")
        if prepared:
            transaction.prepare()
        getattr(transaction, end)()
    assert recorded.counts() == ((2, 2, 2) if end == "commit" else NOTHING)


def test_a_connection_that_was_invalidated_has_recorded_nothing(recorded, export, connection):
    connection.begin()
    export.delay(42)
    connection.invalidate()
    with pytest.raises(PendingRollbackError):
        connection.commit()
    connection.rollback()
    export.delay(43)
    connection.commit()
    assert recorded.counts() == ONE_JOB


def order_and_commit(session: Session, export: Any) -> None:
    session.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
    export.delay(42)
    session.commit()


def order_in_a_block(session: Session, export: Any) -> None:
    with session.begin():
        session.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
        export.delay(42)


@pytest.mark.parametrize("order", [order_and_commit, order_in_a_block])
def test_an_error_of_the_write_comes_out_of_the_commit_and_the_session_goes_on(
    outbox, recorded, export, orders, session, order
):
    break_writes(recorded)
    try:
        with pytest.raises(DBAPIError, match="refused"):
            order(session, export)
        session.rollback()
    finally:
        mend_writes(recorded)
    assert session.scalar(text("SELECT count(*) FROM orders_of_a_test")) == 0
    export.delay(43)
    session.commit()
    assert recorded.counts() == ONE_JOB


def test_a_transaction_whose_write_failed_cannot_be_committed(recorded, export, orders, connection):
    break_writes(recorded)
    try:
        connection.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
        export.delay(42)
        with pytest.raises(DBAPIError, match="refused"):
            connection.execute(select(recorded.tables.job.c.id))
        with pytest.raises(NotWritten, match="1 calls of this transaction cannot be written"):
            connection.commit()
        connection.rollback()
    finally:
        mend_writes(recorded)
    # Neither are the application's rows in the transaction that follows.
    export.delay(43)
    connection.commit()
    assert recorded.counts() == ONE_JOB
    assert connection.scalar(text("SELECT count(*) FROM orders_of_a_test")) == 0


def test_a_connection_without_a_rollback_is_clean_when_it_is_used_again(
    outbox, recorded, export, orders
):
    break_writes(recorded)
    try:
        with outbox.engine.connect() as connection, outbox.use(connection):
            connection.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
            export.delay(42)
            with pytest.raises(DBAPIError, match="refused"):
                connection.commit()
    finally:
        mend_writes(recorded)
    with outbox.engine.begin() as connection:
        connection.execute(text("INSERT INTO orders_of_a_test VALUES (2)"))
    with outbox.engine.connect() as connection:
        assert connection.scalars(text("SELECT id FROM orders_of_a_test")).all() == [2]


def test_a_commit_that_another_listener_stops_leaves_nothing_for_the_next_transaction(
    outbox, recorded, export, caplog
):
    def stop(connection: Connection) -> None:
        raise RuntimeError("stopped")

    with outbox.engine.connect() as connection, outbox.use(connection):
        event.listen(connection, "commit", stop, once=True)
        export.delay(42)
        with pytest.raises(RuntimeError, match="stopped"):
            connection.commit()
        connection.rollback()
        export.delay(43)
        connection.commit()
    assert recorded.counts() == ONE_JOB
    assert "outbox.calls_lost count=1" in caplog.text


def test_in_autocommit_a_call_is_written_at_once(postgresql_installed_url):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export, recorded = add_task(outbox.app), Database(outbox.engine, outbox.tables)
        with outbox.engine.connect() as connection, outbox.use(connection):
            connection.execution_options(isolation_level="AUTOCOMMIT")
            export.delay(42)
            assert recorded.counts() == ONE_JOB


def test_also_where_the_driver_alone_knows_of_it(outbox, recorded, export):
    def autocommit(driver: Any, on: bool) -> None:
        if connection.dialect.name == "sqlite":
            driver.isolation_level = None if on else ""
        elif connection.dialect.name == "postgresql":
            driver.autocommit = on
        else:
            driver.autocommit(on)

    with outbox.engine.connect() as connection, outbox.use(connection):
        autocommit(connection.connection.dbapi_connection, True)
        export.delay(42)
        assert recorded.counts() == ONE_JOB
        connection.rollback()
        autocommit(connection.connection.dbapi_connection, False)
    assert recorded.counts() == ONE_JOB


@pytest.mark.parametrize("end", ["commit", "rollback", "close"])
def test_a_commit_past_sqlalchemy_is_no_silent_loss(outbox, export, orders, caplog, end):
    with outbox.engine.connect() as connection, outbox.use(connection):
        connection.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
        export.delay(42)
        connection.connection.commit()
        if end == "commit":
            with pytest.raises(
                NotWritten, match=r"ended past SQLAlchemy.*outbox\.write\(session\)"
            ):
                connection.commit()
        else:
            getattr(connection, end)()
            assert "outbox.calls_lost count=1 tasks=shop.export" in caplog.text


@pytest.mark.parametrize("past", ["commit", "rollback"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_nor_does_it_carry_calls_into_the_transaction_that_follows(
    outbox, recorded, export, orders, caplog, past, end
):
    insert_one = text("INSERT INTO orders_of_a_test VALUES (1)")
    with outbox.engine.connect() as connection, outbox.use(connection):
        connection.execute(insert_one)
        export.delay(42)
        getattr(connection.connection, past)()
        connection.execute(insert_one)
        if end == "commit":
            with pytest.raises(NotWritten, match="ended past SQLAlchemy"):
                connection.commit()
        else:
            connection.rollback()
            assert "outbox.calls_lost count=1 tasks=shop.export" in caplog.text
    assert recorded.counts() == NOTHING


def test_a_second_statement_in_one_text_may_be_the_commit(recorded_postgresql):
    outbox, recorded = recorded_postgresql
    export = add_task(outbox.app)
    with outbox.engine.connect() as connection, outbox.use(connection):
        export.delay(42)
        connection.exec_driver_sql("SELECT 1; COMMIT")
        connection.rollback()
    assert recorded.counts() == ONE_JOB


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_session_that_is_prepared_decides_about_its_calls(recorded_postgresql, end):
    outbox, recorded = recorded_postgresql
    export = add_task(outbox.app)
    with Session(outbox.engine, twophase=True) as session, outbox.use(session):
        export.delay(42)
        session.prepare()
        getattr(session, end)()
    assert recorded.counts() == (ONE_JOB if end == "commit" else NOTHING)


@pytest.mark.parametrize("mode", ["conditional_savepoint", "rollback_only", "create_savepoint"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_session_inside_the_transaction_of_a_connection_shares_its_fate(
    outbox, recorded, export, mode, end
):
    with outbox.engine.connect() as connection:
        connection.begin()
        with Session(connection, join_transaction_mode=mode) as session, outbox.use(session):
            export.delay(42)
            session.commit()
        getattr(connection, end)()
    assert recorded.counts() == (ONE_JOB if end == "commit" else NOTHING)


def test_what_is_written_before_it_is_committed_by_it(outbox, recorded, export, connection):
    connection.begin()
    export.delay(42)
    outbox.write(connection)
    connection.connection.commit()
    connection.rollback()
    assert recorded.counts() == ONE_JOB


# -- who sees what is not written yet --------------------------------------------------


@pytest.mark.parametrize(
    "look",
    [
        lambda tables: select(func.count()).select_from(tables.job),
        lambda tables: text("select count(*) from outbox_message"),
        lambda tables: text(
            "WITH found AS (SELECT * FROM outbox_event) SELECT count(*) FROM found"
        ),
    ],
    ids=["core", "text", "with"],
)
def test_a_statement_that_names_the_tables_sees_the_calls(recorded, export, connection, look):
    connection.begin()
    export.delay(42)
    assert connection.scalar(look(recorded.tables)) == 1
    export.delay(43)
    assert connection.scalar(look(recorded.tables)) == 2
    connection.rollback()
    assert recorded.counts() == NOTHING


def test_a_row_of_the_callers_may_refer_to_a_job(outbox, recorded, export, session):
    metadata = MetaData()
    Table("outbox_job", metadata, Column("id", Name(255), primary_key=True))
    orders = Table(
        "orders_of_a_test",
        metadata,
        Column("job", Name(255), ForeignKey("outbox_job.id")),
        **TABLE_OPTIONS,
    )
    orders.create(outbox.engine)
    try:
        session.execute(insert(orders).values(job=export.delay(1).id))
        session.execute(insert(orders), [{"job": export.delay(n).id} for n in range(2)])
        session.commit()
        assert recorded.counts() == (3, 3, 3)
        with outbox.engine.connect() as connection:
            assert set(connection.scalars(select(orders.c.job))) == set(ids(recorded))
    finally:
        orders.drop(outbox.engine)


def test_statements_about_other_things_leave_the_calls_together(outbox, orders, export, session):
    with statements(outbox.engine) as sent:
        for number in range(100):
            session.execute(text("INSERT INTO orders_of_a_test VALUES (:id)"), {"id": number})
            export.delay(number)
        session.commit()
    written = [each for each in sent if "outbox_" in each]
    assert len(written) == (1 if outbox.engine.dialect.name == "postgresql" else 3)


def test_a_setting_of_the_transaction_finds_the_calls_before_it_written(postgresql_installed_url):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        with outbox.engine.begin() as connection, outbox.use(connection):
            export.delay(42)
            # Where the tables are looked for, from here on.
            connection.execute(text("SET LOCAL search_path TO pg_catalog"))
        assert Database(outbox.engine, outbox.tables).counts() == ONE_JOB


# -- ids of the caller's own -----------------------------------------------------------


def test_an_id_that_is_another_task_s_job_is_an_error_at_the_call(
    outbox, recorded, export, session
):
    recorded.put(State.QUEUED, job_id="export-42", task="shop.other")
    first = export.delay(1)
    with pytest.raises(JobIdTaken):
        export.apply_async((2,), task_id="export-42")
    session.commit()
    assert recorded.job(first.id).state == "queued"


def test_calls_with_ids_of_their_own_keep_their_place(recorded, export, session):
    made = [
        export.apply_async((n,), task_id=f"export-{n}" if n % 3 == 0 else None).id for n in range(9)
    ]
    session.commit()
    assert ids(recorded) == made


def test_ids_as_celery_makes_them_cost_nothing_more_and_are_absorbed_all_the_same(
    outbox, recorded, export, session
):
    again = "6a6e5d6e-3a0e-4f3e-9d6e-0123456789ab"
    recorded.put(State.SUCCEEDED, job_id=again)
    before = recorded.counts()
    with statements(outbox.engine) as sent:
        twice = "7a6e5d6e-3a0e-4f3e-9d6e-0123456789ab"
        for task_id in (again, twice, twice):
            export.apply_async((1,), task_id=task_id)
        session.commit()
    # MariaDB says that one of the rows is there, and not which.
    attempts = 2 if is_mysql(outbox.engine.dialect) else 1
    assert [
        len([each for each in sent if f"INSERT INTO {table}" in each])
        for table in ("outbox_job", "outbox_message", "outbox_event")
    ] == [attempts, 1, 1]
    assert recorded.counts() == tuple(number + 1 for number in before)
    assert recorded.job(again).state == "succeeded"


def test_such_an_id_of_another_task_comes_out_of_the_commit(recorded, export, session):
    taken = "6a6e5d6e-3a0e-4f3e-9d6e-0123456789ab"
    recorded.put(State.QUEUED, job_id=taken, task="shop.other")
    before = recorded.counts()
    export.delay(1)
    export.apply_async((2,), task_id=taken)
    with pytest.raises(JobIdTaken, match=taken):
        session.commit()
    session.rollback()
    assert recorded.counts() == before


def test_a_call_is_still_checked_when_it_is_made(recorded, export, session):
    export.delay(1)
    for wrong in ((object(),), (1,)):
        with pytest.raises(RecordError) as error:
            export.apply_async(wrong, queue="q" * 300 if wrong == (1,) else None)
        assert isinstance(error.value, UnserializableArgument) == (wrong != (1,))
    session.commit()
    assert recorded.counts() == ONE_JOB


# -- threads, processes, memory --------------------------------------------------------


def test_a_connection_that_threads_share_by_mistake_loses_no_call(outbox, recorded, export):
    # Looking for the tables takes the connection for itself.
    made: list[str] = [export.delay("once per engine").id]
    with outbox.engine.connect() as connection:
        connection.begin()
        ready = threading.Barrier(4)

        def call() -> None:
            ready.wait()
            for number in range(50):
                made.append(export.apply_async((number,), session=connection).id)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        connection.commit()
    assert sorted(ids(recorded)) == sorted(made)
    assert len(made) == 201


def test_a_call_while_another_thread_commits_is_refused_or_recorded(outbox, recorded, export):
    made: list[str] = []
    refused: list[Exception] = []

    with outbox.engine.connect() as connection:
        connection.begin()
        export.apply_async((1,), session=connection)

        def call() -> None:
            try:
                made.append(export.apply_async((2,), session=connection).id)
            except Unusable as error:
                refused.append(error)

        def meanwhile(connection: Connection) -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        # After ours: the calls are written, and the driver has not committed.
        event.listen(outbox.engine, "commit", meanwhile, once=True)
        connection.commit()
    assert (made, recorded.counts()) == ([], ONE_JOB)
    assert "use one for each thread or task" in str(refused[0])


def test_a_listener_of_the_commit_may_make_a_call(recorded, export, connection):
    connection.begin()
    export.delay(1)
    event.listen(connection, "commit", lambda connection: export.delay(2), once=True)
    connection.commit()
    assert recorded.counts() == (2, 2, 2)
    export.delay(3)
    connection.commit()
    assert recorded.counts() == (3, 3, 3)


def test_a_child_process_does_not_write_what_its_parent_has_recorded(recorded_postgresql):
    outbox, recorded = recorded_postgresql
    export = add_task(outbox.app)
    with Session(outbox.engine) as session, outbox.use(session):
        export.delay(42)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert recorded.counts() == NOTHING
        session.commit()
    assert recorded.counts() == ONE_JOB


def test_nothing_is_kept_of_a_connection_that_is_gone(outbox, export):
    for _ in range(20):
        with outbox.engine.connect() as connection:
            export.apply_async((1,), session=connection)
            connection.commit()
    del connection
    gc.collect()
    assert len(outbox.database.buffers._of) == 0


# -- what these tests need -------------------------------------------------------------


@pytest.fixture
def recorded_postgresql(postgresql_installed_url: str) -> Iterator[tuple[Outbox, Database]]:
    """An outbox on PostgreSQL, and what is in its database."""
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        yield outbox, Database(outbox.engine, outbox.tables)


def break_writes(recorded: Database) -> None:
    """Make the last of the three inserts of a call fail."""
    if recorded.engine.dialect.name == "sqlite":
        recorded.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON outbox_event"
            " BEGIN SELECT RAISE(FAIL, 'refused'); END"
        )
        return
    if recorded.engine.dialect.name != "postgresql":
        recorded.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON outbox_event FOR EACH ROW"
            " SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'"
        )
        return
    recorded.execute(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'refused'; END $$"
    )
    recorded.execute(
        "CREATE TRIGGER broken BEFORE INSERT ON outbox_event FOR EACH ROW EXECUTE FUNCTION refuse()"
    )


def mend_writes(recorded: Database) -> None:
    """Undo :func:`break_writes`."""
    on = " ON outbox_event" if recorded.engine.dialect.name == "postgresql" else ""
    recorded.execute(f"DROP TRIGGER IF EXISTS broken{on}")


def test_a_call_needs_no_lock_that_another_thread_may_hold_in_a_fork(outbox, export, recorded):
    def call() -> None:
        with outbox.engine.begin() as connection, outbox.use(connection):
            export.delay()

    call()
    with app_module._making, outbox.database.buffers._lock:
        # As in a child that was forked while they were held: nobody releases them there.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert recorded.counts() == (2, 2, 2)
