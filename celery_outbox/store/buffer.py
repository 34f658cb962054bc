"""Calls that belong to an open transaction and are not written yet.

They are kept beside the connection and written together, before the transaction is committed and
before any statement to which they would make a difference.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, Table, event
from sqlalchemy.util.concurrency import in_greenlet

from celery_outbox.exceptions import NotWritten, UnusableSession
from celery_outbox.log import log_event
from celery_outbox.store.calls import Call, write_calls
from celery_outbox.store.engine import begin_before_savepoint, in_driver_transaction
from celery_outbox.store.recording import MOST_ROWS
from celery_outbox.store.schema import Tables
from celery_outbox.store.statements import Effect, Reader

logger = logging.getLogger("celery_outbox.store")

#: Bytes of arguments and envelopes that are kept at most before they are written.
MOST_BYTES = 4 * 1024 * 1024


def can_wait(connection: Connection | Engine) -> bool:
    """Whether the database can be talked to here: with an asynchronous driver only in what
    SQLAlchemy runs for the event loop, and not in a coroutine itself."""
    return not connection.dialect.is_async or in_greenlet()


class Buffers:
    """The calls that wait on the connections of one process.

    Arguments:
        tables: the outbox tables.
        ensure_ready: checks the tables behind a connection.
    """

    def __init__(self, tables: Tables, ensure_ready: Callable[[Connection], None]) -> None:
        self._tables = tables
        self._ensure_ready = ensure_ready
        self._of: WeakKeyDictionary[Connection, _Buffer] = WeakKeyDictionary()
        self._reader = Reader(t.name for t in vars(tables).values() if isinstance(t, Table))
        self._followed: WeakSet[Engine] = WeakSet()
        self._lock = threading.Lock()

    def add(self, connection: Connection, call: Call) -> None:
        """Record a call in the transaction of a connection, which is begun where it is not.

        Raises:
            UnusableSession: somebody else is committing this transaction.
            sqlalchemy.exc.DBAPIError, JobIdTaken: see :meth:`write`.
        """
        if not connection.in_transaction():
            # As the first statement of a call that is not kept would do.
            connection.begin()
        buffer = self._of.get(connection) or self._follow(connection)
        buffer.add(connection, call)

    def write(self, connection: Connection) -> None:
        """Write what waits on a connection, in the order of the calls.

        Raises:
            NotWritten: it cannot be written any more in this transaction.
            JobIdTaken: an id is a job of another task.
            sqlalchemy.exc.DBAPIError: the database is away or refuses.
        """
        buffer = self._of.get(connection)
        if buffer is not None:
            buffer.write(connection)

    def _follow(self, connection: Connection) -> _Buffer:
        self._follow_engine(connection.engine)
        mine = _Buffer(self._tables, self._ensure_ready, self._reader)
        with mine.lock:
            # Another thread may use the connection, too: one buffer, and its transaction is
            # followed before it takes a call.
            buffer = self._of.setdefault(connection, mine)
            if buffer is mine:
                # A connection that was there before its engine was followed asks for its own
                # listeners alone (SQLAlchemy 2.0).
                event.listen(connection, "savepoint", begin_before_savepoint)
        return buffer

    def _follow_engine(self, engine: Engine) -> None:
        """Follow all its connections: to listen to each by itself would take longer than what is
        listened for."""
        if engine in self._followed:
            # Without the lock, which a thread may hold while this process is forked.
            return
        with self._lock:
            if engine not in self._followed:
                for name in _EVENTS:
                    event.listen(engine, name, self._hand_over(name))
                self._followed.add(engine)

    def _hand_over(self, name: str) -> Callable[..., None]:
        """A listener that does what the buffer of a connection does, if it has one."""
        buffers, do = self._of, _EVENTS[name]

        def listener(connection: Connection, *rest: Any) -> None:
            buffer = buffers.get(connection)
            if buffer is not None:
                do(buffer, connection, *rest)

        return listener


class _Buffer:
    """The calls of one connection's transaction, since the last savepoint began in it."""

    def __init__(
        self, tables: Tables, ensure_ready: Callable[[Connection], None], reader: Reader
    ) -> None:
        self.lock = threading.RLock()
        self._tables = tables
        self._ensure_ready = ensure_ready
        self._reader = reader
        self._calls: list[Call] = []
        self._ids: set[str] = set()
        self._size = 0
        #: The driver was seen in a transaction with these calls.
        self._open = False
        #: And then out of it.
        self._past = False
        #: A write of calls was begun and failed.
        self._failed = False
        #: The thread that is ending the transaction; nobody else may add to it.
        self._ending: int | None = None
        self._writing = False

    def add(self, connection: Connection, call: Call) -> None:
        """Keep a call; write it where enough have come together."""
        with self.lock:
            ending = self._ending is not None and connection.in_transaction()
            if ending and (self._ending != threading.get_ident() or not can_wait(connection)):
                remedy = "somebody else is ending its transaction; use one for each thread or task"
                raise UnusableSession(
                    task=call.new.task, kind=type(connection).__name__, remedy=remedy
                )
            self._calls.append(call)
            self._ids.add(call.new.id)
            self._size += call.size
            self._look(connection)
            full = len(self._calls) >= MOST_ROWS or self._size >= MOST_BYTES
        if (full or ending) and can_wait(connection):
            self.write(connection)

    def write(self, connection: Connection) -> None:
        """See :meth:`Buffers.write`."""
        while calls := self._take(connection):
            self._writing = True
            try:
                self._ensure_ready(connection)
                write_calls(connection, self._tables, calls)
            except BaseException:
                # Some of the rows may be there: only a rollback leads on from here.
                self._failed = True
                with self.lock:
                    self._calls[:0] = calls
                raise
            finally:
                self._writing = False

    def _take(self, connection: Connection) -> list[Call]:
        with self.lock:
            if not self._calls:
                return []
            if self._failed:
                self._refuse("the statement that was to write them failed")
            self._look(connection)
            if self._past:
                # By the driver's own commit or rollback, or by the server, which rolls back after
                # a deadlock (MariaDB, MySQL): who knows which of them.
                self._refuse("their transaction was ended past SQLAlchemy")
            taken, self._calls = self._calls[:MOST_ROWS], self._calls[MOST_ROWS:]
            if not self._calls:
                self._forget()
            return taken

    def _refuse(self, problem: str) -> None:
        raise NotWritten(count=len(self._calls), problem=problem)

    def _forget(self) -> None:
        self._calls, self._ids, self._size = [], set(), 0
        self._open = self._past = self._failed = False

    def _lose(self) -> None:
        tasks = ",".join(sorted({call.new.task for call in self._calls}))
        count = len(self._calls)
        log_event(logger, logging.ERROR, "outbox.calls_lost", count=count, tasks=tasks)
        self._forget()

    def _look(self, connection: Connection) -> None:
        inside = in_driver_transaction(connection)
        self._past = self._past or (self._open and inside is False)
        self._open = self._open or inside is True

    # -- what happens on the connection ------------------------------------------------

    def _begun(self, connection: Connection, *rest: Any) -> None:
        with self.lock:
            if self._calls:
                # Another listener has stopped a commit, and SQLAlchemy says nothing of what
                # follows it.
                self._lose()
            self._ending = None

    def _commit(self, connection: Connection, *rest: Any) -> None:
        try:
            while True:
                self.write(connection)
                with self.lock:
                    if not self._calls:
                        self._ending = threading.get_ident()
                        return
        except BaseException:
            # SQLAlchemy takes it for a commit that failed in the database, which would have
            # rolled back: its own rollback() sends nothing after this.
            with self.lock:
                self._forget()
                self._ending = threading.get_ident()
            with suppress(Exception):
                connection.dialect.do_rollback(connection.connection)
            raise

    def _commit_twophase(self, connection: Connection, xid: Any, is_prepared: bool) -> None:
        if not is_prepared:
            self._commit(connection)

    def _rolled_back(self, connection: Connection, *rest: Any) -> None:
        with self.lock:
            self._look(connection)
            if self._calls and self._past and not self._failed:
                self._lose()
            self._forget()
            self._ending = threading.get_ident()

    def _before_statement(
        self,
        connection: Connection,
        cursor: Any,
        statement: str,
        parameters: Any,
        *rest: Any,
    ) -> None:
        if not self._calls or self._writing:
            return
        effect = self._effect(connection, statement, parameters)
        if effect is Effect.NEEDS_THEM:
            self.write(connection)
        elif effect is Effect.NONE:
            self._look(connection)

    def _after_statement(
        self, connection: Connection, cursor: Any, statement: str, parameters: Any, *rest: Any
    ) -> None:
        if not self._calls or self._writing:
            return
        if self._effect(connection, statement, parameters) is Effect.UNDOES_THEM:
            # What was kept is younger than any savepoint: each began with a write.
            with self.lock:
                self._forget()

    def _effect(self, connection: Connection, statement: str, parameters: Any) -> Effect:
        sqlite = connection.dialect.name == "sqlite"
        return self._reader.effect(statement, parameters, ids=self._ids, sqlite=sqlite)


#: What ends a transaction, and what may look at what was recorded in it.
_EVENTS: dict[str, Callable[..., None]] = {
    "begin": _Buffer._begun,
    "begin_twophase": _Buffer._begun,
    "commit": _Buffer._commit,
    "prepare_twophase": _Buffer._commit,
    "commit_twophase": _Buffer._commit_twophase,
    "rollback": _Buffer._rolled_back,
    "rollback_twophase": _Buffer._rolled_back,
    "before_cursor_execute": _Buffer._before_statement,
    "after_cursor_execute": _Buffer._after_statement,
}
