"""The database's clock in SQL, and datetimes that are UTC on every database."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from sqlalchemy import DateTime, bindparam
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.expression import FunctionElement
from sqlalchemy.types import TypeDecorator

from celery_outbox.store.dialects import MYSQL


class UTCDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored in UTC; SQLite stores text that sorts like the time it names."""

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Any) -> Any:
        """With a time zone where the database has such a type, and with microseconds."""
        if dialect.name in MYSQL:
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        """To UTC; naive for databases that keep no time zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone")
        value = value.astimezone(timezone.utc)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        """To an aware datetime in UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=timezone.utc)
        return value.astimezone(timezone.utc)


class after_now(FunctionElement[datetime]):
    """The time ``seconds`` from now by the database's clock."""

    type = UTCDateTime()
    inherit_cache = True
    name = "after_now"


def db_now() -> after_now:
    """The database's clock."""
    return after_now(bindparam("seconds", 0.0, unique=True))


def db_after(seconds: float) -> after_now:
    """The time ``seconds`` from now by the database's clock."""
    return after_now(bindparam("seconds", float(seconds), unique=True))


def db_moment(value: datetime | timedelta | None) -> Any:
    """What a column gets for a time: an absolute one as it is, ``None`` for now, and a
    ``timedelta`` from now by the database's clock."""
    if isinstance(value, timedelta):
        return db_after(value.total_seconds())
    return db_now() if value is None else value


@compiles(after_now, "postgresql")
def _postgresql(element: after_now, compiler: Any, **options: Any) -> str:
    # statement_timestamp() is STABLE, so an index serves a comparison with it; now() would
    # stand still during the long transactions of callers.
    seconds = compiler.process(element.clauses, **options)
    return f"(statement_timestamp() + {seconds} * interval '1 second')"


@compiles(after_now, "sqlite")
def _sqlite(element: after_now, compiler: Any, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    # '000' fills the milliseconds up to the six digits in which datetimes are stored.
    return f"strftime('%Y-%m-%d %H:%M:%f000', 'now', {seconds} || ' seconds')"


@compiles(after_now, *MYSQL)
def _mysql(element: after_now, compiler: Any, **options: Any) -> str:
    seconds = compiler.process(element.clauses, **options)
    # Whole microseconds: seconds of a float would be rounded on their way. The function gives the
    # time at which the statement began.
    microseconds = f"CAST(ROUND({seconds} * 1000000) AS SIGNED)"
    return f"(UTC_TIMESTAMP(6) + INTERVAL {microseconds} MICROSECOND)"
