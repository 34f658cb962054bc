"""Which errors of a database may pass, and a transaction that is run again after one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from celery_outbox.store.dialects import mysql_code
from celery_outbox.store.engine import Limit, write_transaction

Result = TypeVar("Result")

#: A deadlock or a serialization failure (PostgreSQL, Appendix A, class 40).
_ROLLED_BACK = frozenset({"40001", "40P01"})

#: MariaDB and MySQL: a lock was not had in time; a deadlock; a row that changed after the snapshot
#: (MariaDB, innodb_snapshot_isolation).
_MYSQL_ROLLED_BACK = frozenset({1205, 1213, 1020})

#: MariaDB and MySQL: too many connections (1040, 1203), no or no writable server for now (1053,
#: 1077, 1129, 1158 to 1161, 1290, 1836, 2002, 2003), the connection lost (1927, 2006, 2013, 2055,
#: 4031).
_MYSQL_AWAY = frozenset(
    {1040, 1203, 1053, 1077, 1129, 1158, 1159, 1160, 1161, 1290, 1836, 2002, 2003}
    | {1927, 2006, 2013, 2055, 4031}
)


def is_transient(error: BaseException) -> bool:
    """Whether the same transaction may succeed when it is tried again.

    True for a lost connection, a deadlock, a serialization failure, a lock that was not had in
    time, and for SQLite's "database is locked".
    """
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    number = mysql_code(error.orig)
    if number is not None:
        return number in _MYSQL_ROLLED_BACK or number in _MYSQL_AWAY
    code = _code_of(error)
    if code is not None:
        # Class 08: connection exception; 57P0x: the server shuts down or starts up;
        # 53300: too many connections.
        return code in _ROLLED_BACK or code[:2] == "08" or code[:4] == "57P0" or code == "53300"
    kind = type(error.orig).__name__
    if kind == "InterfaceError":
        return True
    if kind != "OperationalError":
        return False
    text = str(error.orig).lower()
    # SQLite tells a missing table by the same class as a lock; a driver that cannot connect
    # has no code at all.
    return "no such" not in text and "has no column" not in text


def _was_rolled_back(error: DBAPIError) -> bool:
    number = mysql_code(error.orig)
    if number is not None:
        return number in _MYSQL_ROLLED_BACK
    if _code_of(error) is not None:
        return _code_of(error) in _ROLLED_BACK
    # SQLite has no codes.
    text = str(error.orig).lower()
    return type(error.orig).__name__ == "OperationalError" and "locked" in text


def _code_of(error: DBAPIError) -> str | None:
    code = getattr(error.orig, "pgcode", None) or getattr(error.orig, "sqlstate", None)
    return None if code is None else str(code)


def retry_transaction(
    engine: Engine,
    work: Callable[[Connection], Result],
    *,
    attempts: int = 5,
    limit: Limit = nullcontext,
) -> Result:
    """Run ``work`` in a write transaction, again when the database rolled it back.

    Arguments:
        work: gets the connection; must be safe to run again, since only the last run commits.
        attempts: how often at most; a lost connection or lasting trouble is raised after that.
        limit: see :func:`write_transaction`.
    """

    def run() -> Result:
        with write_transaction(engine, limit) as connection:
            return work(connection)

    return again(run, attempts)


def again(work: Callable[[], Result], attempts: int = 5) -> Result:
    """Run ``work``, at once again when the database rolled it back.

    A database that cannot be reached is left to callers, who know how long to wait.

    Arguments:
        attempts: how often at most; only twice where connections are lost: the first may have
            been lost long ago, while it was in the pool.
    """
    lost = 0
    for attempt in range(1, attempts + 1):
        try:
            return work()
        except DBAPIError as error:
            lost += error.connection_invalidated
            worth_it = lost == 1 if error.connection_invalidated else _was_rolled_back(error)
            if attempt == attempts or not worth_it:
                raise
    raise AssertionError("unreachable")
