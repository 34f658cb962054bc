"""Wakes a dispatcher that has nothing to do: LISTEN/NOTIFY on PostgreSQL, else the clock."""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.log import cause, log_event
from celery_outbox.store.engine import write_transaction
from celery_outbox.store.notification import (
    ARRIVALS,
    Take,
    fall_asleep,
    listen,
    notify,
    wake_up,
)

logger = logging.getLogger("celery_outbox.dispatch")

Limit = Callable[[Any], AbstractContextManager[Any]]

#: Seconds within which a notification to oneself must arrive.
PROBE_TIMEOUT = 5.0
#: Seconds after which a connection that was heard is tried again.
PROBE_INTERVAL = 60.0
#: Seconds of the first wait of a dispatcher that is not notified, because somebody is recording; it
#: doubles from one to the next.
SHORTEST_NAP, LONGEST_NAP = 0.01, 60.0
#: Seconds after which LISTEN is tried again where it was not heard.
DEAF_INTERVAL = 600.0


class Wakeup(Protocol):
    """Something to wait on."""

    def wait(self, seconds: float) -> None:
        """Return when something may be due, at the latest after ``seconds``."""

    def doze(self) -> None:
        """Have whoever records from now on end :meth:`wait`. What was recorded before does not:
        look for it after this."""

    def rise(self) -> None:
        """There is enough to do: nobody need end a wait."""

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

    def doze(self) -> None:
        """See :meth:`Wakeup.doze`."""

    def rise(self) -> None:
        """See :meth:`Wakeup.rise`."""

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


class Listening(Polling):
    """Waits for a NOTIFY on one connection of its own; polls while that cannot be had.

    A LISTEN may be accepted and never answered: by PgBouncer in transaction mode, or on a
    connection whose other end is gone. So this sends itself a notification over another connection,
    before it relies on the first, and again now and then. That nothing arrives is said in the log,
    once.

    Arguments:
        engine: makes the connections.
        channel: the NOTIFY channel.
        limit: bounds how long a connection of the driver may take in a block.
    """

    def __init__(self, engine: Engine, channel: str, limit: Limit = nullcontext) -> None:
        super().__init__()
        self._limit = limit
        self._engine = engine
        self._channel = channel
        self._take: Take = set
        self._probe = ""
        self._connection: Any = None
        self._listens = False
        #: Whoever records notifies.
        self._dozes = False
        #: Seconds of the next wait in which nobody need notify.
        self._nap = SHORTEST_NAP
        self._is_deaf = False
        #: Until when a probe that was sent must have arrived; ``None``: none is under way.
        self._expected_by: float | None = None
        self._probe_at = 0.0
        self._connect_at = 0.0

    def start(self) -> None:
        """Connect, and send the first probe; :meth:`wait` goes on from there."""
        self._connect()

    def wait(self, seconds: float) -> None:
        """See :meth:`Wakeup.wait`."""
        if self._connection is None:
            self._connect()
        if self._connection is None:
            super().wait(seconds)
            return
        if self._listens and not self._dozes:
            seconds = min(seconds, self._nap)
            self._nap = min(2 * self._nap, LONGEST_NAP)
        try:
            self._hear(seconds)
        except Exception as error:  # the driver's errors have no common base that we import
            self._lost(error)

    def doze(self) -> None:
        """See :meth:`Wakeup.doze`."""
        if self._listens and not self._dozes:
            self._dozes = self._ask(fall_asleep)

    def rise(self) -> None:
        """See :meth:`Wakeup.rise`."""
        self._nap = SHORTEST_NAP
        if self._dozes:
            self._ask(wake_up)
            self._dozes = False

    def _ask(self, question: Callable[[Any, str], Any]) -> bool:
        try:
            with self._limit(self._connection):
                return bool(question(self._connection, self._channel))
        except Exception as error:  # the driver's own, as above
            self._lost(error)
            return False

    def close(self) -> None:
        """See :meth:`Wakeup.close`."""
        super().close()
        self._disconnect()

    def _connect(self) -> None:
        if time.monotonic() < self._connect_at:
            return
        try:
            pooled = self._engine.raw_connection()
            pooled.detach()
            self._connection = pooled.dbapi_connection
            self._connection.autocommit = True
            self._take = ARRIVALS[self._engine.dialect.driver](self._connection)
            # A channel of this connection's own: a pooler leaves the LISTEN behind on a connection
            # that others use, and what arrives there may be found on any of them.
            self._probe = f"outbox.probe.{secrets.token_hex(8)}"
            self._listen(self._probe)
            self._send_probe()
        except (SQLAlchemyError, OSError) as error:
            log_event(logger, logging.WARNING, "outbox.listen_failed", error=type(error).__name__)
            self._disconnect()
        except Exception as error:  # the driver's own, as above
            self._lost(error)

    def _listen(self, channel: str) -> None:
        with self._limit(self._connection):
            listen(self._connection, channel)

    def _send_probe(self) -> None:
        with write_transaction(self._engine, self._limit_probe) as connection:
            notify(connection, self._probe)
        self._expected_by = time.monotonic() + PROBE_TIMEOUT

    def _limit_probe(self, connection: Connection) -> AbstractContextManager[Any]:
        return self._limit(connection.connection.dbapi_connection)

    def _hear(self, seconds: float) -> None:
        connection = self._connection
        # What arrived before is in the driver's list and would not show on the socket.
        heard = self._take()
        if not heard:
            at = self._probe_at if self._expected_by is None else self._expected_by
            self._select([self._receiver, connection], min(seconds, at - time.monotonic()))
            heard = self._take()
        if self._probe in heard:
            self._trust()
        elif self._expected_by is None:
            if time.monotonic() >= self._probe_at:
                self._send_probe()
        elif time.monotonic() >= self._expected_by:
            self._distrust()

    def _trust(self) -> None:
        self._expected_by = None
        self._probe_at = time.monotonic() + PROBE_INTERVAL
        if not self._listens:
            # What was committed meanwhile is found by the look that follows this wait.
            self._listen(self._channel)
            self._listens = True
        if self._is_deaf:
            self._is_deaf = False
            log_event(logger, logging.INFO, "outbox.listen_restored")

    def _distrust(self) -> None:
        if self._listens:
            # It was heard before: this connection is dead, and another may be heard.
            self._lost(TimeoutError("a notification of its own did not arrive"))
            return
        self._disconnect()
        self._connect_at = time.monotonic() + DEAF_INTERVAL
        if not self._is_deaf:
            self._is_deaf = True
            log_event(
                logger,
                logging.WARNING,
                "outbox.listen_unheard",
                so="polling",
                hint="notifications do not get through, as with PgBouncer in transaction mode",
            )

    def _lost(self, error: Exception) -> None:
        log_event(logger, logging.WARNING, "outbox.listen_lost", error=cause(error))
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._listens, self._dozes, self._expected_by = False, False, None
        if connection is not None:
            connection.close()


def open_wakeup(engine: Engine, channel: str, notify: bool, limit: Limit = nullcontext) -> Wakeup:
    """The wake-up for a database: LISTEN where it can be had, polling elsewhere.

    Arguments:
        engine: the database.
        channel: the NOTIFY channel.
        notify: whether the configuration permits LISTEN.
        limit: bounds how long a connection of the driver may take in a block.
    """
    if not notify or engine.dialect.name != "postgresql":
        return Polling()
    if engine.dialect.driver not in ARRIVALS:
        log_event(
            logger, logging.WARNING, "outbox.listen_unsupported", driver=engine.dialect.driver
        )
        return Polling()
    listening = Listening(engine, channel, limit)
    listening.start()
    return listening
