"""Wakes a dispatcher that has nothing to do: LISTEN/NOTIFY on PostgreSQL, else the clock."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.dispatch")


class Wakeup(Protocol):
    """Something to wait on."""

    def wait(self, seconds: float) -> None:
        """Return when something may be due, at the latest after ``seconds``."""

    def set(self) -> None:
        """Make :meth:`wait` return at once; may be called in a signal handler or thread."""

    def close(self) -> None:
        """Let go of what it holds."""


class Polling:
    """Waits for the time to pass, or for :meth:`set`."""

    def __init__(self) -> None:
        # A socket pair, not an Event: select() serves signal handlers, threads and files alike.
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def wait(self, seconds: float) -> None:
        """See :meth:`Wakeup.wait`."""
        self._select([self._receiver], seconds)

    def set(self) -> None:
        """See :meth:`Wakeup.set`."""
        try:
            self._sender.send(b"\x00")
        except (BlockingIOError, OSError):
            # Full: it is awake already. Closed: nobody waits.
            return

    def close(self) -> None:
        """See :meth:`Wakeup.close`."""
        self._receiver.close()
        self._sender.close()

    def _select(self, files: list[Any], seconds: float) -> list[Any]:
        ready, _, _ = select.select(files, [], [], max(seconds, 0.0))
        if self._receiver in ready:
            self._receiver.recv(4096)
        return ready


def _take_psycopg2(connection: Any) -> bool:
    connection.poll()
    arrived = bool(connection.notifies)
    connection.notifies.clear()
    return arrived


def _take_psycopg(connection: Any) -> bool:
    # Of libpq itself: the driver's own way blocks, and cannot be woken by anything else.
    libpq = connection.pgconn
    libpq.consume_input()
    arrived = False
    while libpq.notifies() is not None:
        arrived = True
    return arrived


#: Drivers that can listen; each function takes what has arrived, without waiting, and returns
#: whether that was anything.
_DRIVERS: dict[str, Callable[[Any], bool]] = {
    "psycopg2": _take_psycopg2,
    "psycopg": _take_psycopg,
}


class Listening(Polling):
    """Waits for a NOTIFY on one connection of its own; polls while that connection is away.

    Arguments:
        engine: makes the connection.
        channel: the NOTIFY channel.
    """

    def __init__(self, engine: Engine, channel: str) -> None:
        super().__init__()
        self._engine = engine
        self._channel = channel
        self._take = _DRIVERS[engine.dialect.driver]
        self._connection: Any = None

    def start(self) -> None:
        """Begin to listen: what is committed from here on wakes the next :meth:`wait`."""
        self._listen()

    def wait(self, seconds: float) -> None:
        """See :meth:`Wakeup.wait`."""
        connection = self._listen()
        if connection is None:
            super().wait(seconds)
            return
        try:
            # What arrived before is in the driver's list and would not show on the socket.
            if not self._take(connection):
                self._select([self._receiver, connection], seconds)
                self._take(connection)
        except Exception as error:  # the driver's errors have no common base that we import
            self._lost(error)

    def close(self) -> None:
        """See :meth:`Wakeup.close`."""
        super().close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _listen(self) -> Any:
        if self._connection is not None:
            return self._connection
        try:
            pooled = self._engine.raw_connection()
            pooled.detach()
            connection: Any = pooled.dbapi_connection
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(f'LISTEN "{self._channel}"')
            self._connection = connection
        except (SQLAlchemyError, OSError) as error:
            log_event(logger, logging.WARNING, "outbox.listen_failed", error=type(error).__name__)
        except Exception as error:  # the driver's own, as above
            self._lost(error)
        return self._connection

    def _lost(self, error: Exception) -> None:
        log_event(logger, logging.WARNING, "outbox.listen_lost", error=type(error).__name__)
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def open_wakeup(engine: Engine, channel: str, notify: bool) -> Wakeup:
    """The wake-up for a database: LISTEN where it can be had, polling elsewhere.

    Arguments:
        engine: the database.
        channel: the NOTIFY channel.
        notify: whether the configuration permits LISTEN.
    """
    if not notify or engine.dialect.name != "postgresql":
        return Polling()
    if engine.dialect.driver not in _DRIVERS:
        log_event(
            logger, logging.WARNING, "outbox.listen_unsupported", driver=engine.dialect.driver
        )
        return Polling()
    listening = Listening(engine, channel)
    listening.start()
    return listening
