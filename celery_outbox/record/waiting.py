"""Calls made in coroutines through sessions that have no connection yet.

A coroutine cannot wait for a connection. The calls wait in the session: for its first connection
in the same transaction or savepoint, or for the commit, whatever comes first.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from celery_outbox.exceptions import UnusableSession
from celery_outbox.store.buffer import Buffers
from celery_outbox.store.calls import Call
from celery_outbox.store.engine import connection_in
from celery_outbox.store.schema import Tables


class Waiting:
    """The calls that wait in the sessions of one process.

    Arguments:
        tables: the outbox tables.
        buffers: where the calls go as soon as there is a connection.
    """

    def __init__(self, tables: Tables, buffers: Buffers) -> None:
        self._tables = tables
        self._buffers = buffers
        self._of: WeakKeyDictionary[Session, _Calls] = WeakKeyDictionary()

    def add(self, session: Session, call: Call) -> None:
        """Record a call in the transaction of a session, which is begun where it is not.

        Raises:
            UnusableSession: the session does not begin transactions by itself.
        """
        if not session.in_transaction():
            if not session.autobegin:
                raise UnusableSession(
                    task=call.new.task, kind=type(session).__name__, remedy="begin() it first"
                )
            session.begin()
        calls = self._of.get(session)
        if calls is None:
            calls = self._of[session] = _Calls(self._tables, self._buffers)
            calls.listen(session)
        calls.add(session, call)


class _Calls:
    """The calls of one session, each with the transaction or savepoint that it was made in."""

    def __init__(self, tables: Tables, buffers: Buffers) -> None:
        self._tables = tables
        self._buffers = buffers
        self._calls: list[tuple[Any, Call]] = []

    def listen(self, session: Session) -> None:
        event.listen(session, "after_begin", self._connected)
        event.listen(session, "before_commit", self._before_commit)
        event.listen(session, "after_transaction_end", self._ended)

    def add(self, session: Session, call: Call) -> None:
        transaction = session.get_nested_transaction() or session.get_transaction()
        self._calls.append((transaction, call))

    def _connected(self, session: Session, transaction: Any, connection: Connection) -> None:
        if not self._calls:
            return
        bind = session.get_bind(clause=self._tables.job)
        if bind is connection or bind is connection.engine:
            for call in self._take(transaction):
                self._buffers.add(connection, call)

    def _before_commit(self, session: Session) -> None:
        if self._calls:
            # Which comes to _connected.
            connection_in(session, self._tables)

    def _ended(self, session: Session, transaction: Any) -> None:
        # Committed ones have found a connection.
        self._take(transaction)

    def _take(self, transaction: Any) -> list[Call]:
        taken = [call for made_in, call in self._calls if made_in is transaction]
        self._calls = [each for each in self._calls if each[0] is not transaction]
        return taken
