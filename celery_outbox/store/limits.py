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
from typing import Any

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
        self._watched: dict[object, tuple[float, int]] = {}
        self._thread: threading.Thread | None = None
        self._sleeping = False

    @contextmanager
    def at_most(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Cut ``connection`` when this block takes longer than ``seconds``."""
        handle = _socket_of(connection)
        if handle is None:
            yield
            return
        key = object()
        with self._changed:
            self._watched[key] = (time.monotonic() + seconds, handle)
            self._wake()
        try:
            yield
        finally:
            with self._changed:
                self._watched.pop(key, None)

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="outbox-limits", daemon=True)
            # Not when the interpreter is about to end.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        elif self._sleeping:
            self._changed.notify()

    def _run(self) -> None:
        idle_since = time.monotonic()
        with self._changed:
            while True:
                now = time.monotonic()
                if self._watched:
                    idle_since = now
                self._sleeping = now - idle_since > LINGER
                self._changed.wait(None if self._sleeping else TICK)
                if self._sleeping:
                    idle_since = time.monotonic()
                self._cut_overdue()

    def _cut_overdue(self) -> None:
        now = time.monotonic()
        for key, (deadline, handle) in list(self._watched.items()):
            if now >= deadline:
                # The connection is in its block, and so open: the number is still its socket's.
                del self._watched[key]
                log_event(logger, logging.ERROR, "outbox.database_silent")
                _shut_down(handle)


def _socket_of(connection: Connection) -> int | None:
    """The file descriptor of the connection's socket, where its driver tells it."""
    driver: Any = connection.connection.dbapi_connection
    fileno = getattr(driver, "fileno", None)
    return None if fileno is None else int(fileno())


def _shut_down(handle: int) -> None:
    # A copy is closed afterwards; the driver's own stays the driver's.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handle)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
