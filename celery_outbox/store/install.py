"""Makes the tables, and checks that those in the database are the ones this code needs."""

from __future__ import annotations

from sqlalchemy import Connection, inspect, select, text
from sqlalchemy.schema import CreateSchema

from celery_outbox.exceptions import SchemaMismatch, SchemaMissing
from celery_outbox.store.dialects import insert_if_absent
from celery_outbox.store.schema import SCHEMA_VERSION, Tables

# Any fixed number serves; this one is "outbox" in ASCII.
_LOCK = 0x6F7574626F78


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
        if tables.schema:
            connection.execute(CreateSchema(tables.schema, if_not_exists=True))
    found = version(connection, tables)
    if found is not None:
        _compare(connection, found)
    missing = not _has_tables(connection, tables)
    tables.metadata.create_all(connection, checkfirst=True)
    insert_if_absent(connection, tables.version, {"version": SCHEMA_VERSION})
    return missing


def verify(connection: Connection, tables: Tables) -> None:
    """Check that the tables are there and have the version that this code needs.

    Raises:
        SchemaMissing: there are no outbox tables.
        SchemaMismatch: there are tables of another version.
    """
    found = version(connection, tables)
    if found is None:
        raise missing(connection)
    _compare(connection, found)


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
