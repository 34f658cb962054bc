"""Bounds the time for which a database may be silent, where its driver would wait for ever.

libpq waits for an answer as long as the connection lives, and a connection whose other end is
gone, or stuck, may seem to live for hours. Here a thread shuts down the socket of a
connection that has been silent for too long; the driver then reports a lost connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.store")

#: Seconds between two looks: so much later than its time a connection may be cut.
TICK = 0.2
#: Seconds without anything to look at, after which the thread sleeps until it is woken.
LINGER = 10.0


class Limits:
    """Watches over the connections of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: dict[object, tuple[float, Socket]] = {}
        self._thread: threading.Thread | None = None
        self._sleeping = False

    @contextmanager
    def at_most(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Cut ``connection`` when this block takes longer than ``seconds``."""
        with self.driver_at_most(connection.connection.dbapi_connection, seconds):
            yield

    @contextmanager
    def driver_at_most(self, driver: Any, seconds: float) -> Iterator[None]:
        """As :meth:`at_most`, for a connection of the driver's own."""
        found = _socket_of(driver)
        if found is None:
            yield
            return
        key = object()
        with self._changed:
            self._watched[key] = (time.monotonic() + seconds, found)
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._watched.pop(key, None)

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="outbox-limits", daemon=True)
            # Not when the interpreter is about to end.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        elif self._sleeping:
            self._changed.notify()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                now = time.monotonic()
                if self._watched:
                    idle_since = now
                self._sleeping = now - idle_since > LINGER
                self._changed.wait(None if self._sleeping else TICK)
                if self._sleeping:
                    idle_since = time.monotonic()
                    self._sleeping = False
                cut = self._cut_overdue()
            # Without the lock: whatever takes the log may use the database, and wait for it.
            for _ in range(cut):
                log_event(logger, logging.ERROR, "outbox.database_silent")

    def _cut_overdue(self) -> int:
        now = time.monotonic()
        overdue = [key for key, (deadline, _) in self._watched.items() if now >= deadline]
        return sum(_shut_down(self._watched.pop(key)[1]) for key in overdue)


class Socket(NamedTuple):
    """A socket of this process: a number is given to another one when it is closed, so what it
    stood for tells them apart."""

    number: int
    identity: tuple[int, int]


def _socket_of(driver: Any) -> Socket | None:
    """The connection's socket, where its driver tells it; ``None``: there is none, or no more."""
    # PyMySQL shows its socket nowhere else.
    fileno = getattr(driver, "fileno", None) or getattr(
        getattr(driver, "_sock", None), "fileno", None
    )
    if fileno is None:
        return None
    try:
        number = int(fileno())
        return Socket(number, _identity(number))
    except Exception:  # a closed connection: each driver has an error of its own for it
        return None


def _identity(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_dev, found.st_ino


def _shut_down(found: Socket) -> bool:
    """Whether the socket was there to be shut down."""
    # A copy, which stays what it is while it is looked at; the driver's own stays the driver's.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.number)) as copy:
        if _identity(copy.fileno()) == found.identity:
            copy.shutdown(socket.SHUT_RDWR)
            return True
    return False
