"""Opens the database: engines, and short write transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.orm import Session

from celery_outbox.exceptions import ConfigurationError
from celery_outbox.store.dialects import is_mysql
from celery_outbox.store.schema import Tables

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
        if parsed.get_dialect().is_async:
            raise _unusable(
                f"{parsed.get_driver_name()} is an asynchronous driver, which the outbox's own"
                " transactions cannot use",
                f"{_use_driver(parsed)} Your sessions keep theirs.",
            )
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
        raise _unusable(
            f"its driver is not installed ({error.name})", f"Install it. {_use_driver(parsed)}"
        ) from error


def check_engine(engine: object) -> None:
    """Check that an engine of the application's can be used for the outbox's own transactions.

    Raises:
        ConfigurationError: it is something else, or asynchronous.
    """
    # An AsyncEngine is no Engine, and the one inside it runs in its coroutines only.
    if not isinstance(engine, Engine) or engine.dialect.is_async:
        raise ConfigurationError(
            setting="engine of Outbox(app, engine=...)",
            problem=f"it is of type {type(engine).__name__}"
            + (" with an asynchronous driver" if isinstance(engine, Engine) else ""),
            remedy="Pass what sqlalchemy.create_engine() returns for a driver that is not"
            " asynchronous, or set outbox_database_url.",
        )


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


def _use_driver(url: URL) -> str:
    """Which driver there is in any case for this database."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        return "Use sqlite://."
    driver, extra = ("psycopg2", backend) if backend == "postgresql" else ("pymysql", "mysql")
    return f"Use {backend}+{driver}://, which `pip install 'celery-outbox[{extra}]'` brings."


def _unusable(
    problem: str, remedy: str = "Example: postgresql+psycopg2://user:password@host/database"
) -> ConfigurationError:
    return ConfigurationError(setting="outbox_database_url", problem=problem, remedy=remedy)


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


@contextmanager
def autocommit(connection: Connection) -> Iterator[None]:
    """A block in which each statement of a connection is a transaction of its own (PostgreSQL).

    It is the driver that is told, and not SQLAlchemy, which would have it set the isolation level
    of the session: psycopg2 asks the server for that each time.
    """
    driver: Any = connection.connection.dbapi_connection
    was = driver.autocommit
    try:
        # In the block: a soft time limit may come at any point, and the pool would give the
        # connection to somebody who needs a transaction.
        driver.autocommit = True
        yield
    finally:
        # A connection that was lost is not used again.
        with suppress(connection.dialect.loaded_dbapi.Error):
            driver.autocommit = was


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
