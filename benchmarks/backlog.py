"""Rows of the outbox by the thousand, made in the database out of one that a real call made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Engine, Table, text

from celery_outbox.store.schema import Tables


def clear(connection: Connection, tables: Tables) -> None:
    """Empty the tables of jobs."""
    names = ", ".join(each.name for each in (tables.job, tables.message, tables.event))
    connection.execute(text(f"TRUNCATE {names} CASCADE"))


def multiply(
    connection: Connection,
    tables: Tables,
    job_id: str,
    count: int,
    *,
    job: Mapping[str, str] | None = None,
    message: Mapping[str, str] | None = None,
    prefix: str = "",
) -> None:
    """Have ``count`` jobs like this one, itself included: with its message and its journal, ids of
    their own, and each a microsecond later than the one before.

    Arguments:
        job: SQL expressions for columns of the job; ``n`` is its number.
        message: the same for its message.
        prefix: of the new ids, so that they can be told from others.
    """
    connection.execute(text("CREATE TEMPORARY TABLE made (n bigint, id text) ON COMMIT DROP"))
    new = "gen_random_uuid()::text" if not prefix else f"'{prefix}' || n"
    connection.execute(
        text(f"INSERT INTO made SELECT n, {new} FROM generate_series(1, {count - 1}) AS n")
    )
    later = {
        name: f"t.{name} + n * interval '1 microsecond'"
        for name in ("recorded_at", "available_at", "created_at", "due_at", "at")
    }
    own_id = {"id": "made.id", "envelope": "replace(t.envelope, :old, made.id)"}
    of_job = {"job_id": "made.id"}
    _copy(connection, tables.job, "id", job_id, {**later, **own_id, **(job or {})}, ())
    values = {**later, **of_job, **(message or {})}
    _copy(connection, tables.message, "job_id", job_id, values, ("id",))
    _copy(connection, tables.event, "job_id", job_id, {**later, **of_job}, ("id",))


def settle(engine: Engine) -> None:
    """Clean up and count, as autovacuum would have by now, and write to disk what is dirty."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))


def _copy(
    connection: Connection,
    table: Table,
    key: str,
    job_id: str,
    values: Mapping[str, Any],
    without: tuple[str, ...],
) -> None:
    names = [column.name for column in table.c if column.name not in without]
    chosen = ", ".join(values.get(name, f"t.{name}") for name in names)
    statement = (
        f"INSERT INTO {table.name} ({', '.join(names)}) "
        f"SELECT {chosen} FROM made CROSS JOIN {table.name} AS t WHERE t.{key} = :old ORDER BY n"
    )
    connection.execute(text(statement), {"old": job_id})
