"""Calls that Celery makes for one group are recorded in one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from celery import Celery
from sqlalchemy import Connection

from celery_outbox.context import running_job
from celery_outbox.store.database import Database
from celery_outbox.store.engine import begin_immediate
from celery_outbox.store.patience import patiently

#: Seconds after which the calls of a block go on in another transaction.
LONGEST = 0.5

#: Seconds between two calls after which the second one is recorded by itself.
PAUSE = 0.3

_current: ContextVar[Batch | None] = ContextVar("outbox_batch", default=None)


class Batch:
    """A transaction of the outbox's own for several calls, begun when the first one needs it.

    It is not kept open for long: the tasks of a group may come from a generator that takes its
    time, and Celery's first ones run before the last ones are made. What comes after a pause is
    left to a transaction of its own, since the next pause may follow.

    Arguments:
        database: the outbox tables.
        timeout: seconds for which callbacks wait for the database.
    """

    def __init__(self, database: Database, timeout: float) -> None:
        self._database = database
        self._timeout = timeout
        self._stack = ExitStack()
        self._connection: Connection | None = None
        self._began = 0.0
        self._asked = time.monotonic()

    @property
    def connection(self) -> Connection | None:
        """The connection whose transaction a call belongs to; ``None``: it has its own."""
        now = time.monotonic()
        paused, self._asked = now - self._asked > PAUSE, now
        if self._connection is not None and (paused or now - self._began > LONGEST):
            self._stack.close()
            self._connection = None
        if paused:
            return None
        if self._connection is None:
            self._began = now
            running = running_job.get()
            if running is not None and running.settled:
                self._connection = patiently(self._begin, timeout=self._timeout, what="callback")
            else:
                self._connection = self._begin()
        return self._connection

    def _begin(self) -> Connection:
        with ExitStack() as stack:
            connection = stack.enter_context(self._database.engine.connect())
            stack.enter_context(connection.begin())
            begin_immediate(connection)
            self._database.ensure_ready(connection)
            self._stack = stack.pop_all()
        return connection

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *error: Any) -> None:
        # With an error it is rolled back.
        self._stack.__exit__(*error)


@contextmanager
def together(database: Database, timeout: float) -> Iterator[None]:
    """Record the calls of this block, as far as they come with no transaction, in one; in several
    where they take longer than :data:`LONGEST`.

    Arguments:
        database: the outbox tables.
        timeout: seconds for which callbacks wait for the database.
    """
    if _current.get() is not None:
        yield
        return
    with Batch(database, timeout) as batch:
        token = _current.set(batch)
        try:
            yield
        finally:
            _current.reset(token)


def connection_here() -> Connection | None:
    """The connection of the block that runs here, or ``None``: there is none."""
    batch = _current.get()
    return None if batch is None else batch.connection


def install(app: Celery, block: Callable[[], AbstractContextManager[None]]) -> None:
    """Make one transaction of what Celery sends with one producer; safe to repeat.

    Celery's groups ask the app for a producer, and send their tasks with it.

    Arguments:
        block: what the producer is used in.
    """
    stock = app.producer_or_acquire
    if hasattr(stock, "_celery_outbox"):
        return

    def producer_or_acquire(producer: Any = None) -> Any:
        return stock(producer) if producer is not None else _acquired(stock, block)

    producer_or_acquire._celery_outbox = True  # type: ignore[attr-defined]
    app.producer_or_acquire = app.default_producer = producer_or_acquire


@contextmanager
def _acquired(
    stock: Callable[[], AbstractContextManager[Any]],
    block: Callable[[], AbstractContextManager[None]],
) -> Iterator[Any]:
    with ExitStack() as stack:
        stack.enter_context(block())
        yield _LaterProducer(lambda: stack.enter_context(stock()))


class _LaterProducer:
    """Takes a producer out of the pool when something is really sent: none may be free, and tasks
    of the outbox need none."""

    def __init__(self, acquire: Callable[[], Any]) -> None:
        self._acquire = acquire
        self._acquired: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._acquired is None:
            self._acquired = self._acquire()
        return getattr(self._acquired, name)
