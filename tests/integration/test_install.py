from __future__ import annotations

import threading

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, inspect

from celery_outbox import SchemaMismatch, SchemaMissing
from celery_outbox.core.states import State
from celery_outbox.store import install, messages
from celery_outbox.store.engine import open_engine
from celery_outbox.store.schema import SCHEMA_VERSION, build_tables
from tests.factories import Database, add_task, open_database, open_outbox
from tests.processes import Processes
from tests.wait import eventually

TABLES = {
    "chord",
    "chord_part",
    "job",
    "message",
    "event",
    "checkpoint",
    "lock",
    "worker",
    "version",
}


def table_names(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(inspect(connection).get_table_names(schema=database.tables.schema))


def test_init_makes_the_tables_and_is_safe_to_repeat(database_url: str):
    with open_outbox(database_url, init=False) as outbox:
        assert [outbox.init(), outbox.init()] == [True, False]
        database = Database(outbox.engine, outbox.tables)
        assert table_names(database) == {f"outbox_{name}" for name in TABLES}
        assert database.do(install.version) == SCHEMA_VERSION


def test_init_again_keeps_what_is_recorded_and_adds_what_is_missing(database_url: str):
    with open_database(database_url) as database:
        job = database.put(State.QUEUED)
        database.execute("DROP TABLE outbox_lock")
        assert database.do(install.install) is True
        assert "outbox_lock" in table_names(database)
        assert database.job(job.id).state is State.QUEUED


def test_init_in_several_threads_at_once_succeeds_in_each(database_url: str):
    ready, errors = threading.Barrier(4), []

    def init() -> None:
        with open_outbox(database_url, init=False) as outbox:
            outbox.engine.dialect  # noqa: B018 - opened before the race
            ready.wait()
            try:
                outbox.init()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=init) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with open_database(database_url, init=False) as database:
        assert table_names(database) == {f"outbox_{name}" for name in TABLES}


def test_init_in_two_processes_at_once_succeeds_in_both(
    database_url: str, processes: Processes, tmp_path
):
    code = (
        "import pathlib, sys\n"
        "from tests.factories import open_outbox\n"
        "url, go, name = sys.argv[1:]\n"
        "with open_outbox(url, init=False) as outbox:\n"
        "    pathlib.Path(go + name).touch()\n"
        "    while not pathlib.Path(go).exists(): pass\n"
        "    outbox.init()\n"
    )
    go = tmp_path / "go"
    both = [processes.python("-c", code, database_url, str(go), name) for name in ("1", "2")]
    eventually(lambda: len(list(tmp_path.glob("go?"))) == 2)
    go.touch()
    assert [process.wait() for process in both] == [0, 0]


def test_the_prefix_of_the_tables_can_be_chosen(database_url: str):
    with open_outbox(database_url, outbox_table_prefix="Shop_job_") as outbox:
        result = add_task(outbox.app).delay()
        database = Database(outbox.engine, outbox.tables)
        assert table_names(database) == {f"Shop_job_{name}" for name in TABLES}
        assert database.job(result.id).state is State.QUEUED


def test_two_prefixes_live_in_one_database(database_url: str):
    with (
        open_database(database_url, prefix="a_") as first,
        open_database(database_url, prefix="b_") as second,
    ):
        first.put(State.QUEUED)
        assert first.counts() == (1, 1, 1)
        assert second.counts() == (0, 0, 0)


def test_the_tables_live_in_a_schema_of_their_own_on_postgresql(postgresql_url: str):
    with open_outbox(postgresql_url, outbox_schema="jobs") as outbox:
        result = add_task(outbox.app).delay()
        database = Database(outbox.engine, outbox.tables)
        assert table_names(database) == {f"outbox_{name}" for name in TABLES}
        assert database.job(result.id).state is State.QUEUED
        assert len(database.do(messages.claim, claim="c", lease=60, limit=10)) == 1
    with open_database(postgresql_url, init=False) as default:
        assert table_names(default) == set()


def test_the_tables_can_be_part_of_an_applications_own_metadata(database_url: str):
    metadata = MetaData()
    orders = Table("orders", metadata, Column("id", Integer, primary_key=True))
    tables = build_tables(metadata=metadata)
    assert tables.metadata is metadata
    engine = open_engine(database_url)
    try:
        # What a migration of Alembic's does, where celery outbox init is not used.
        metadata.create_all(engine)
        database = Database(engine, tables)
        database.execute(tables.version.insert().values(version=SCHEMA_VERSION))
        database.execute(orders.insert().values(id=1))
        database.do(install.verify)
        assert database.put(State.SUCCEEDED).state is State.SUCCEEDED
    finally:
        engine.dispose()


def test_a_call_before_init_names_the_command_and_not_the_password(database_url: str):
    with open_outbox(database_url, init=False) as outbox:
        task = add_task(outbox.app)
        with pytest.raises(SchemaMissing, match="celery -A yourapp outbox init"):
            task.delay()
        outbox.init()
        assert outbox.job(task.delay().id).state == "queued"


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_tables_of_another_version_are_neither_used_nor_changed(installed_url: str, version):
    with open_outbox(installed_url, init=False) as outbox:
        database = Database(outbox.engine, outbox.tables)
        database.execute(outbox.tables.version.update().values(version=version))
        try:
            with pytest.raises(SchemaMismatch, match=rf"version {version}.*needs version"):
                add_task(outbox.app).delay()
            with pytest.raises(SchemaMismatch):
                outbox.init()
            assert database.counts() == (0, 0, 0)
        finally:
            database.execute(outbox.tables.version.update().values(version=SCHEMA_VERSION))


def test_a_database_is_checked_once(database_url: str, monkeypatch):
    checks = []
    verify = install.verify
    monkeypatch.setattr(install, "verify", lambda *args: (checks.append(1), verify(*args)))
    with open_outbox(database_url) as outbox:
        task = add_task(outbox.app)
        for _ in range(3):
            task.delay()
    assert checks == [1]
