"""Databases that are busy, cannot be reached, or cannot be used."""

from __future__ import annotations

import traceback
from collections import Counter

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from celery_outbox import ConfigurationError, Outbox
from celery_outbox.core.states import State
from celery_outbox.store.engine import begin_immediate, open_engine, write_transaction
from celery_outbox.store.recording import record
from celery_outbox.store.rerun import is_transient, retry_transaction
from tests.factories import Database, add_task, make_app, new_job, open_database
from tests.integration.delivering import deliver
from tests.processes import Processes
from tests.wait import eventually

#: Each process records jobs while all of them claim, run and end what is due, whoever's it is.
LIVES = """
import pathlib, sys
from celery_outbox.store import job, messages, publishing, recording, transitions
from tests.factories import new_job, open_database
url, folder, name = sys.argv[1:]
folder = pathlib.Path(folder)
with open_database(url, init=False) as database:
    (folder / f"ready-{name}").touch()
    while not (folder / "go").exists(): pass
    for number in range(200):
        new = new_job(f"{name}-{number}")
        database.do(recording.record, new, actor="caller")
        claim = f"{name}:{number}"
        # There is always one to claim, but InnoDB skips a row, too, that another's scan holds
        # for a moment without wanting it.
        claimed = []
        while not claimed:
            claimed = database.do(messages.claim, claim=claim, lease=600, limit=1)
        [message] = claimed
        database.do(publishing.mark, [message], claim, actor=name)
        def take(connection, tables):
            found = job.lock(connection, tables, message.job_id)
            return transitions.claim(connection, tables, found, actor=name, lease=60)
        token = database.do(take)
        end = {"attempt": 1, "actor": name, "result": name.encode(), "result_type": None}
        assert database.do(transitions.succeed, message.job_id, token, **end)
"""


@pytest.mark.parametrize("installed_url", ["sqlite", "mariadb"], indirect=True)
def test_processes_that_write_side_by_side_never_see_an_error(
    installed_url: str, processes: Processes, tmp_path
):
    writers = [processes.python("-c", LIVES, installed_url, str(tmp_path), name) for name in "1234"]
    eventually(lambda: len(list(tmp_path.glob("ready-?"))) == 4)
    (tmp_path / "go").touch()
    assert [writer.wait(120) for writer in writers] == [0, 0, 0, 0]
    with open_database(installed_url, init=False) as database:
        assert database.counts() == (800, 800, 3200)
        with database.engine.connect() as connection:
            ends = connection.execute(select(database.tables.job)).mappings().all()
    # Every claim had a job of its own: none was taken twice, and none twice by one process.
    assert {(end["state"], end["attempt"], end["lease_token"]) for end in ends} == {
        ("succeeded", 1, 1)
    }
    assert Counter(end["result"] for end in ends) == dict.fromkeys((b"1", b"2", b"3", b"4"), 200)


@pytest.mark.parametrize("driver", ["psycopg2", "psycopg"])
@pytest.mark.parametrize("level", [None, "READ COMMITTED", "SERIALIZABLE", "AUTOCOMMIT"])
def test_one_statement_is_committed_whatever_the_engine_is_set_to(
    postgresql_installed_url: str, driver: str, level: str | None
):
    engine = create_engine(postgresql_installed_url.replace("psycopg2", driver))
    own = engine if level is None else engine.execution_options(isolation_level=level)
    app = make_app(outbox_database_url=postgresql_installed_url)
    outbox = Outbox(app, engine=own)
    job_id = add_task(app).delay(1).id
    # Asked on another connection, while the first is back in its pool.
    with open_database(postgresql_installed_url, init=False) as database:
        assert database.job(job_id).state == "queued"
        assert deliver(app.tasks["shop.export"], job_id) == "SUCCESS"
        assert database.events(job_id) == ["recorded", "claimed", "succeeded"]
    outbox.engine.dispose()
    engine.dispose()


def test_sqlite_is_opened_for_readers_beside_a_writer_and_for_durable_commits(sqlite_url: str):
    with open_database(sqlite_url) as database, database.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "busy_timeout": 30_000,
    }


def test_a_transaction_of_ours_takes_sqlites_write_lock_at_its_start(sqlite_installed_url: str):
    with open_database(sqlite_installed_url, init=False) as database:
        other = open_engine(sqlite_installed_url)
        try:
            with write_transaction(database.engine), other.connect() as second:
                second.exec_driver_sql("PRAGMA busy_timeout = 0")
                second.rollback()
                with pytest.raises(OperationalError, match="locked") as raised:
                    begin_immediate(second)
            assert is_transient(raised.value)
        finally:
            other.dispose()


def test_a_transaction_that_was_rolled_back_is_run_again_and_committed_once(database: Database):
    runs = []

    def work(connection) -> None:
        runs.append(1)
        record(connection, database.tables, new_job(f"run-{len(runs)}"), actor="caller")
        if len(runs) == 1:
            raise DBAPIError("lost", None, Exception(), connection_invalidated=True)

    retry_transaction(database.engine, work)
    assert database.job("run-2").state is State.QUEUED
    assert database.counts() == (1, 1, 1)


def test_an_error_that_does_not_pass_is_raised_at_once(database: Database):
    runs = []

    def work(connection) -> None:
        runs.append(1)
        connection.exec_driver_sql("SELECT * FROM no_such_table")

    with pytest.raises(DBAPIError) as raised:
        retry_transaction(database.engine, work)
    assert len(runs) == 1
    assert not is_transient(raised.value)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nonsense", "not a SQLAlchemy URL"),
        ("", "not a SQLAlchemy URL"),
        ("postgresql://shop:s3cret@host:port/db", "not a SQLAlchemy URL"),
        ("nosuchdb://shop:s3cret@host/db", "not one of postgresql, mariadb, mysql, sqlite"),
        ("mysql+aiomysql://shop:s3cret@host/db", r"aiomysql is an asynchronous driver"),
        ("postgresql+asyncpg://shop:s3cret@host/db", "Use postgresql+psycopg2://"),
        ("sqlite+aiosqlite:///shop.db", "Use sqlite://. Your sessions keep theirs."),
        ("mariadb+mariadbconnector://shop:s3cret@host/db", "Install it. Use mariadb+pymysql://"),
        ("postgresql+nosuchdriver://shop:s3cret@host/db", "known driver"),
        ("postgresql+pg8000://shop:s3cret@host/db", "driver is not installed"),
    ],
)
def test_a_database_url_that_cannot_be_used_says_why_without_the_password(url, problem):
    app = make_app(outbox_database_url=url)
    with pytest.raises(ConfigurationError, match="Setting outbox_database_url") as raised:
        add_task(app).delay()
    assert problem in str(raised.value)
    # A traceback shows the causes, too.
    told = "".join(traceback.format_exception(raised.value))
    assert "s3cret" not in told.replace(url, "")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (str, "str"),
        (create_async_engine, "AsyncEngine"),
        (lambda url: create_async_engine(url).sync_engine, "asynchronous driver"),
    ],
    ids=["url", "async", "inside"],
)
def test_an_engine_that_cannot_be_used_says_so_at_once(make, kind):
    engine = make("postgresql+psycopg://localhost/shop")
    with pytest.raises(ConfigurationError, match=rf"{kind}.*create_engine\(\)"):
        Outbox(make_app(), engine=engine)


def test_no_database_at_all_says_what_to_set():
    with pytest.raises(ConfigurationError, match=r"Set it, or use Outbox\(app, engine=\.\.\.\)"):
        add_task(make_app()).delay()


def test_a_database_that_cannot_be_reached_is_an_error_at_the_call():
    app = make_app(outbox_database_url="postgresql+psycopg2://shop:s3cret@127.0.0.1:1/shop")
    with pytest.raises(OperationalError) as raised:
        add_task(app).delay()
    assert "s3cret" not in str(raised.value)
    Outbox.of(app).engine.dispose()
