"""Makes the tables, and checks that those in the database are the ones this code needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from sqlalchemy import Connection, func, inspect, select, text
from sqlalchemy.schema import CreateSchema

from celery_outbox.exceptions import SchemaMismatch, SchemaMissing
from celery_outbox.store.dialects import insert_if_absent, is_mysql
from celery_outbox.store.schema import SCHEMA_VERSION, Tables

# Any fixed number serves; this one is "outbox" in ASCII.
_LOCK = 0x6F7574626F78

#: Seconds for which one process waits for another one that makes the tables (MariaDB, MySQL).
_LOCK_TIMEOUT = 60


def install(connection: Connection, tables: Tables) -> bool:
    """Make what is missing; safe to repeat, and to run in several processes at once.

    Returns:
        Whether anything was missing.

    Raises:
        SchemaMismatch: there are tables of another version.
    """
    if connection.dialect.name == "postgresql":
        # CREATE TABLE IF NOT EXISTS by two processes at once fails in one of them.
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    with _named_lock(connection) if is_mysql(connection.dialect) else nullcontext():
        return _install(connection, tables)


@contextmanager
def _named_lock(connection: Connection) -> Iterator[None]:
    # Each CREATE commits what was before it: only a lock of the connection lasts.
    name = {"name": f"outbox:{connection.scalar(select(func.database()))}"[:64]}
    got = text("SELECT GET_LOCK(:name, :seconds)")
    connection.execute(got, {**name, "seconds": _LOCK_TIMEOUT})
    try:
        yield
        # Seen by the next one, which gets the lock before this transaction ends.
        connection.exec_driver_sql("COMMIT")
    finally:
        connection.execute(text("SELECT RELEASE_LOCK(:name)"), name)


def _install(connection: Connection, tables: Tables) -> bool:
    if tables.schema and connection.dialect.name != "sqlite":
        names = inspect(connection).get_schema_names()
        if tables.schema not in names:
            connection.execute(CreateSchema(tables.schema, if_not_exists=True))
    found = version(connection, tables)
    if found is not None:
        _compare(connection, found)
    missing = not _has_tables(connection, tables)
    tables.metadata.create_all(connection, checkfirst=True)
    if is_mysql(connection.dialect):
        # Whoever was killed here has left a table without its indexes.
        for table in tables.metadata.sorted_tables:
            for index in table.indexes:
                index.create(connection, checkfirst=True)
    insert_if_absent(connection, tables.version, {"version": SCHEMA_VERSION})
    return missing


def verify(connection: Connection, tables: Tables) -> str:
    """Check that the tables are there and have the version that this code needs.

    Returns:
        What tells them from those in any other database.

    Raises:
        SchemaMissing: there are no outbox tables.
        SchemaMismatch: there are tables of another version.
    """
    found = version(connection, tables)
    if found is None:
        raise missing(connection)
    _compare(connection, found)
    installation = select(tables.version.c.installation).where(tables.version.c.version == found)
    return str(connection.execute(installation).scalar_one())


def version(connection: Connection, tables: Tables) -> int | None:
    """The version of the tables in the database, or ``None``: there are none."""
    if not inspect(connection).has_table(tables.version.name, schema=tables.schema):
        return None
    statement = select(tables.version.c.version).order_by(tables.version.c.version.desc())
    found: int | None = connection.execute(statement).scalars().first()
    return found


def missing(connection: Connection) -> SchemaMissing:
    """The error for a database without outbox tables."""
    return SchemaMissing(database=connection.engine.url.render_as_string(hide_password=True))


def _has_tables(connection: Connection, tables: Tables) -> bool:
    inspector = inspect(connection)
    return all(
        inspector.has_table(table.name, schema=tables.schema)
        for table in tables.metadata.sorted_tables
    )


def _compare(connection: Connection, found: int) -> None:
    if found == SCHEMA_VERSION:
        return
    remedy = (
        "run `celery -A yourapp outbox init` with a newer celery-outbox installed"
        if found > SCHEMA_VERSION
        else "they were made by an older celery-outbox and need an upgrade"
    )
    raise SchemaMismatch(
        database=connection.engine.url.render_as_string(hide_password=True),
        found=found,
        needed=SCHEMA_VERSION,
        remedy=remedy,
    )
