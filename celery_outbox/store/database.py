"""The outbox tables in one database, as one process reaches them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine

from celery_outbox.exceptions import ConfigurationError, SchemaMissing, WrongDatabase
from celery_outbox.store import install
from celery_outbox.store.buffer import Buffers
from celery_outbox.store.dialects import SMALL, check_room, is_mysql
from celery_outbox.store.engine import autocommit
from celery_outbox.store.limits import Limits
from celery_outbox.store.place import same_place
from celery_outbox.store.rerun import again, retry_transaction
from celery_outbox.store.schema import Tables

Result = TypeVar("Result")


class Database:
    """Opens connections and short transactions of the outbox's own.

    Arguments:
        tables: the outbox tables.
        make_engine: makes the engine, or hands over an existing one, when the first
            connection is needed.
        pid: the process in which an existing engine may have been used.
        patience: seconds for which the database may be silent in one transaction; after that
            the connection is cut.
    """

    def __init__(
        self, tables: Tables, make_engine: Callable[[], Engine], pid: int, *, patience: float
    ) -> None:
        self.tables = tables
        self._patience = patience
        self._limits = Limits()
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._pid = pid
        self._lock = threading.Lock()
        self._parents: list[object] = []
        #: Engines whose tables were checked, and which installation these are.
        self._ready: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()
        #: Calls that wait for the end of other people's transactions.
        self.buffers = Buffers(tables, self.ensure_ready)

    @property
    def engine(self) -> Engine:
        """The engine of this process.

        Raises:
            ConfigurationError: no usable database is configured.
        """
        if self._pid != os.getpid():
            # A connection must not be used on both sides of a fork: the child forgets the
            # parent's without closing them. The lock, too, may have been held in the fork.
            self._lock = threading.Lock()
            self._limits = Limits()
            self._pid = os.getpid()
            if self._engine is not None:
                # mysqlclient says goodbye for a connection that nobody refers to, in the parent's
                # name.
                self._parents.append(self._engine.pool)
            # Also one that is only asked for now: its owner may have used it before the fork.
            self._engine = self._engine or self._make_engine()
            self._engine.dispose(close=False)
        with self._lock:
            if self._engine is None:
                self._engine = self._make_engine()
            return self._engine

    def write(
        self, work: Callable[[Connection], Result], *, patience: float | None = None
    ) -> Result:
        """Run ``work`` in a transaction of its own; again when the database rolled it back.

        Arguments:
            work: gets the connection; may run more than once, and only the last run commits.
            patience: seconds for which the database may be silent; by default as for all.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.DBAPIError: the database is away or refuses.
        """

        def checked(connection: Connection) -> Result:
            self.ensure_ready(connection)
            return work(connection)

        return retry_transaction(self.engine, checked, limit=partial(self.limit, patience=patience))

    def write_all(self, steps: Sequence[Callable[[Connection], None]]) -> None:
        """Run all steps in one transaction, as :meth:`write`, which may take long as a whole: the
        database may be silent for so many seconds in each of them.

        Raises:
            SchemaError, sqlalchemy.exc.DBAPIError: see :meth:`write`.
        """

        def work(connection: Connection) -> None:
            for step in steps:
                with self.limit(connection):
                    step(connection)

        self.write(work, patience=self._patience * (len(steps) + 1))

    @property
    def does_in_one(self) -> bool:
        """Whether this database does in one statement what others need several for."""
        return self.engine.dialect.name == "postgresql"

    def write_in_one(self, work: Callable[[Connection], Result]) -> Result:
        """As :meth:`write`, for a ``work`` that is one statement where :attr:`does_in_one`: it is
        a transaction by itself then, and costs one round trip."""
        if not self.does_in_one:
            return self.write(work)

        def run() -> Result:
            with (
                self.engine.connect() as connection,
                autocommit(connection),
                self.limit(connection),
            ):
                self.ensure_ready(connection)
                return work(connection)

        return again(run)

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run ``work``, which writes nothing.

        Raises:
            SchemaError, sqlalchemy.exc.DBAPIError: see :meth:`write`.
        """

        def run() -> Result:
            with self.engine.connect() as connection, self.limit(connection):
                self.ensure_ready(connection)
                return work(connection)

        return again(run)

    def check_room(self, value: bytes | None) -> None:
        """Check that the database takes a value; asks it only where it is large.

        Raises:
            TooLargeForDatabase: it does not.
            sqlalchemy.exc.DBAPIError: the database is away.
        """
        if value is not None and len(value) > SMALL and is_mysql(self.engine.dialect):
            self.read(lambda connection: check_room(connection, value))

    def limit(
        self, connection: Connection, *, patience: float | None = None
    ) -> AbstractContextManager[None]:
        """Cut a connection on which a block takes too long; the driver then reports that it
        was lost."""
        return self._limits.at_most(connection, self._patience if patience is None else patience)

    def limit_driver(self, driver: object) -> AbstractContextManager[None]:
        """As :meth:`limit`, for a connection of the driver's own."""
        return self._limits.driver_at_most(driver, self._patience)

    def ensure_ready(self, connection: Connection) -> None:
        """Check, once per engine, that the tables are there, have the right version, and are
        those that dispatchers and workers read.

        Raises:
            SchemaMissing: there are no outbox tables.
            SchemaMismatch: they have another version.
            WrongDatabase: the connection is one of another database.
        """
        if connection.engine in self._ready:
            return
        own = self._elsewhere(connection.engine)
        # Another name need not be another database, so the tables themselves are asked.
        needed = None if own is None else self.read(lambda read: self._ready[read.engine])
        found = ""
        try:
            found = install.verify(connection, self.tables)
        except SchemaMissing:
            if own is None:
                raise
        if own is not None and found != needed:
            raise WrongDatabase(
                found=connection.engine.url.render_as_string(hide_password=True),
                needed=own.url.render_as_string(hide_password=True),
            )
        self._ready[connection.engine] = found

    def _elsewhere(self, engine: Engine) -> Engine | None:
        """The outbox's engine, where it does not lead to the same place; ``None``: it does, or
        there is none."""
        try:
            own = self.engine
        except ConfigurationError:
            return None
        return None if engine is own or same_place(engine.url, own.url) else own

    def init(self) -> bool:
        """Make the tables that are missing; safe to repeat.

        Returns:
            Whether any was missing.
        """
        return retry_transaction(
            self.engine, lambda connection: install.install(connection, self.tables)
        )
