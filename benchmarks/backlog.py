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


def multiply(connection: Connection, tables: Tables, job_id: str, count: int) -> None:
    """Have ``count`` jobs like this one, itself included: with its message and its journal, ids of
    their own, and each a microsecond later than the one before.
    """
    _make_ids(connection, count - 1, "gen_random_uuid()::text")
    _copy_all(connection, tables, job_id, _LATER, {})


def add_final(
    connection: Connection, tables: Tables, job_id: str, count: int, *, prefix: str
) -> None:
    """Add so many jobs like this one that ended some time ago, each with its published message and
    one line of its journal.

    Arguments:
        prefix: of their ids.
    """
    _make_ids(connection, count, f"'{prefix}' || gen_random_uuid()::text")
    ended = {
        **{name: f"t.{name} - n * interval '1 millisecond'" for name in _TIMES},
        "state": "'succeeded'",
        "attempt": "1",
        "deliveries": "1",
        "lease_token": "1",
        "started_at": "t.recorded_at - n * interval '1 millisecond'",
        "finished_at": "t.recorded_at - n * interval '1 millisecond'",
    }
    published = {"published_at": "t.due_at - n * interval '1 millisecond'"}
    _copy_all(connection, tables, job_id, ended, published)


def unpublish(connection: Connection, tables: Tables) -> None:
    """Make the messages of jobs that wait due again."""
    connection.execute(
        text(
            f"UPDATE {tables.message.name} AS m SET published_at = NULL, claimed_by = NULL, "
            f"due_at = j.available_at FROM {tables.job.name} AS j "
            "WHERE j.id = m.job_id AND j.state = 'queued' AND m.claimed_by IS NOT NULL"
        )
    )


def settle(engine: Engine) -> None:
    """Clean up and count, as autovacuum would have by now, and write to disk what is dirty."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))


_TIMES = ("recorded_at", "available_at", "created_at", "due_at", "at")
_LATER = {name: f"t.{name} + n * interval '1 microsecond'" for name in _TIMES}


def _make_ids(connection: Connection, count: int, expression: str) -> None:
    connection.execute(text("DROP TABLE IF EXISTS made"))
    connection.execute(text("CREATE TEMPORARY TABLE made (n bigint, id text) ON COMMIT DROP"))
    connection.execute(
        text(f"INSERT INTO made SELECT n, {expression} FROM generate_series(1, {count}) AS n")
    )


def _copy_all(
    connection: Connection,
    tables: Tables,
    job_id: str,
    values: Mapping[str, str],
    of_message: Mapping[str, str],
) -> None:
    """Copy a job, its messages and its journal for each of the new ids.

    Arguments:
        values: SQL expressions for columns, of whatever table; ``n`` is the number.
        of_message: the same for messages alone.
    """
    own_id = {"id": "made.id", "envelope": "replace(t.envelope, :old, made.id)"}
    of_job = {"job_id": "made.id"}
    _copy(connection, tables.job, "id", job_id, {**values, **own_id}, ())
    _copy(connection, tables.message, "job_id", job_id, {**values, **of_message, **of_job}, ("id",))
    at = {name: values[name] for name in _TIMES}
    _copy(connection, tables.event, "job_id", job_id, {**at, **of_job}, ("id",))


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
