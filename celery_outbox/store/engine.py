"""Opens the database: engines, short write transactions, and which errors may pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.orm import Session

from celery_outbox.exceptions import ConfigurationError
from celery_outbox.store.dialects import is_mysql, mysql_code
from celery_outbox.store.schema import Tables

Result = TypeVar("Result")

#: Bounds how long a connection may take in a block.
Limit = Callable[[Connection], AbstractContextManager[Any]]

#: Databases whose conformance is tested.
SUPPORTED = ("postgresql", "mariadb", "mysql", "sqlite")

#: Seconds for which SQLite waits for another process's write transaction.
SQLITE_BUSY_TIMEOUT = 30.0

_LIBPQ_DRIVERS = ("psycopg2", "psycopg")

#: Seconds (milliseconds for tcp_user_timeout) after which a server that does not answer is given
#: up, where libpq would wait for ever (PostgreSQL documentation, section 34.1.2).
_NETWORK_BOUNDS: dict[str, Any] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "application_name": "celery-outbox",
}

#: The same for the drivers of MariaDB and MySQL that take it.
_MYSQL_DRIVERS = ("pymysql", "mysqldb")
_MYSQL_BOUNDS: dict[str, Any] = {"connect_timeout": 10, "charset": "utf8mb4"}

#: States of a transaction, as libpq numbers them (PostgreSQL documentation, section 34.2).
_IDLE, _UNKNOWN = 0, 4

#: SERVER_STATUS_IN_TRANS of the protocol of MariaDB and MySQL.
_IN_TRANSACTION = 1

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


def open_engine(url: str) -> Engine:
    """An engine for the outbox's own transactions.

    Arguments:
        url: SQLAlchemy database URL.

    Raises:
        ConfigurationError: the URL cannot be read, its driver is not installed, or its
            database is not supported.
    """
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() not in SUPPORTED:
            raise _unusable(f"{parsed.get_backend_name()} is not one of {', '.join(SUPPORTED)}")
        if parsed.get_backend_name() == "sqlite":
            engine = create_engine(
                parsed, connect_args={"timeout": SQLITE_BUSY_TIMEOUT}, hide_parameters=True
            )
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "savepoint", begin_before_savepoint)
            return engine
        options, bounds = _options_of(parsed)
        return create_engine(
            parsed,
            # Parameters are arguments and results: they do not belong into error messages.
            # No ping: a transaction whose connection is gone is run again on a new one, and a
            # ping would wait for a server that does not answer.
            pool_use_lifo=True,
            pool_recycle=1800,
            hide_parameters=True,
            connect_args={k: v for k, v in bounds.items() if k not in parsed.query},
            **options,
        )
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        # The text of the URL stays out of the message: it holds a password.
        raise _unusable("it is not a SQLAlchemy URL of a known driver") from error
    except ImportError as error:
        raise _unusable(f"its driver is not installed ({error.name})") from error


def _options_of(url: URL) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an engine for this database, and its driver, are told."""
    if url.get_backend_name() == "postgresql":
        return {}, _NETWORK_BOUNDS if url.get_driver_name() in _LIBPQ_DRIVERS else {}
    known = url.get_driver_name() in _MYSQL_DRIVERS
    # Their default is a snapshot that a wait for a lock does not renew.
    return {"isolation_level": "READ COMMITTED"}, _MYSQL_BOUNDS if known else {}


def transactional(engine: Engine) -> Engine:
    """``engine`` for short transactions, whatever its owner's are: not in autocommit, and each
    statement sees what is committed."""
    if engine.dialect.name == "sqlite":
        return engine
    return engine.execution_options(isolation_level="READ COMMITTED")


def _unusable(problem: str) -> ConfigurationError:
    return ConfigurationError(
        setting="outbox_database_url",
        problem=problem,
        remedy="Example: postgresql+psycopg2://user:password@host/database",
    )


def _prepare_sqlite(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    # WAL lets readers and one writer work side by side; FULL makes a commit durable.
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


@contextmanager
def write_transaction(engine: Engine, limit: Limit = nullcontext) -> Iterator[Connection]:
    """A short transaction of our own, committed at the end of the block.

    On SQLite it takes the write lock at its start: a transaction that reads first and writes
    later fails with "database is locked" as soon as another process wrote in between.

    Arguments:
        limit: a block that bounds how long the connection may take.
    """
    with engine.connect() as connection, limit(connection), connection.begin():
        begin_immediate(connection)
        yield connection


def begin_immediate(connection: Connection) -> None:
    """Take SQLite's write lock, where this is SQLite and the transaction has not begun."""
    if connection.dialect.name != "sqlite":
        return
    driver = connection.connection.dbapi_connection
    if driver is not None and not driver.in_transaction:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def connection_in(session: Session, tables: Tables) -> Connection:
    """The connection of a session's transaction in the database of the outbox tables.

    Raises:
        sqlalchemy.exc.UnboundExecutionError: the session has no bind for them.
    """
    root = session.get_transaction()
    if root is not None and session.in_nested_transaction():
        begin_before_savepoint(root.connection(None, clause=tables.job))
    # A session with several binds knows by the table which database is meant.
    return session.connection(bind_arguments={"clause": tables.job})


def begin_before_savepoint(connection: Connection, name: str | None = None) -> None:
    """Begin SQLite's transaction, where this is SQLite and it has not begun: its driver does not
    do so for a savepoint, and the release of the savepoint would be the commit."""
    if connection.dialect.name == "sqlite" and in_driver_transaction(connection) is False:
        connection.exec_driver_sql("BEGIN")


def in_driver_transaction(connection: Connection) -> bool | None:
    """Whether the driver is in a transaction, as far as it says so without asking the server;
    ``None``: it does not say."""
    if connection.closed or connection.invalidated:
        return None
    driver: Any = connection.connection.driver_connection
    if connection.dialect.name == "sqlite":
        return getattr(driver, "in_transaction", None)
    if hasattr(driver, "server_status"):  # PyMySQL
        return bool(driver.server_status & _IN_TRANSACTION)
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_in_transaction())
    status = getattr(getattr(driver, "info", None), "transaction_status", _UNKNOWN)
    return None if status == _UNKNOWN else status != _IDLE


def is_autocommit(connection: Connection) -> bool:
    """Whether each statement of this connection is a transaction of its own."""
    driver: Any = connection.connection.dbapi_connection
    if is_mysql(connection.dialect):
        told = getattr(driver, "get_autocommit", bool)()
    elif connection.dialect.name == "sqlite":
        told = driver.isolation_level is None and not in_driver_transaction(connection)
    else:
        told = getattr(driver, "autocommit", False)
    if told is True:
        # Its owner has told the driver, and SQLAlchemy knows nothing of it.
        return True
    level = connection.get_execution_options().get("isolation_level")
    if level is None:
        level = getattr(connection.dialect, "_on_connect_isolation_level", None)
    return bool(level == "AUTOCOMMIT")


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
