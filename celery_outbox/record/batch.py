"""The calls of one group or chord are kept in memory and written in one transaction."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import groupby
from typing import Any

from celery_outbox.context import running_job
from celery_outbox.record.alone import Step
from celery_outbox.store.calls import Call, write_calls
from celery_outbox.store.recording import MOST_ROWS
from celery_outbox.store.schema import Tables

#: So many calls, and bytes of their arguments and envelopes, are written all or none; of more,
#: what has come together is written and the rest follows.
MOST_CALLS = 10_000
MOST_BYTES = 64 * 1024 * 1024

#: Seconds that a group's generator may take for the next task. When it takes longer, what it
#: yields is written as it comes, since Celery's first tasks run before the last ones are made.
PAUSE = 0.9

#: Seconds that it may take altogether before what it has yielded is written.
LONGEST = 60.0

#: So many calls after a pause are written one by one, since the next pause may follow. What comes
#: at once after these is written together.
SINGLE = 10


class Batch:
    """Calls that are written together, in their order.

    Arguments:
        tables: the outbox tables.
        write: runs steps in one transaction.
        lazy: the calls may take their time to come, and need not all be written at once.
        began: when what makes them was begun, by this process's monotonic clock.
    """

    def __init__(
        self, tables: Tables, write: Callable[..., None], *, lazy: bool, began: float
    ) -> None:
        self._tables = tables
        self._write = write
        self._lazy = lazy
        self._owner = _here()
        self._open = True
        self._kept: list[Call | Step] = []
        self._size = 0
        self._first = self._last = began
        #: Calls since the last pause, where there was one.
        self._after_pause: int | None = None

    @property
    def takes_calls(self) -> bool:
        """Whether a call that is made here belongs to it. A thread or an asynchronous task that
        was started in the block has a copy of its context, and goes on after it; and a job that
        runs in the block has calls of its own."""
        pid, thread, *others = _here()
        return (
            self._open
            and self._owner[:2] == (pid, thread)
            and all(mine is its for mine, its in zip(others, self._owner[2:], strict=True))
        )

    def add(self, call: Call | Step) -> None:
        """Keep a call, or another write that keeps its place between the calls.

        Raises:
            RecordError, sqlalchemy.exc.DBAPIError: calls were to be written now and could not be;
                this one is not kept.
        """
        size = call.size if isinstance(call, Call) else 0
        if self._kept and (len(self._kept) >= MOST_CALLS or self._size + size > MOST_BYTES):
            self.write()
        if not self._kept:
            self._first = time.monotonic()
        self._kept.append(call)
        self._size += size
        if self._lazy and self._is_late():
            try:
                self.write()
            except BaseException:
                self._kept.pop()
                self._size -= size
                raise
        self._last = time.monotonic()

    def _is_late(self) -> bool:
        now = time.monotonic()
        if now - self._last > PAUSE:
            self._after_pause = 0
        if self._after_pause is None:
            return now - self._first > LONGEST
        self._after_pause += 1
        return self._after_pause <= SINGLE or now - self._first > PAUSE

    def close(self) -> None:
        """Take no more calls."""
        self._open = False

    def write(self) -> None:
        """Write what is kept; what could not be written is still kept.

        Raises:
            RecordError, sqlalchemy.exc.DBAPIError: it cannot be written.
        """
        # In a process that was forked in the block, it is the parent's.
        if self._kept and self._owner[0] == os.getpid():
            self._write(*self._steps())
            self._kept, self._size = [], 0

    def _steps(self) -> Iterator[Step]:
        for is_call, some in groupby(self._kept, key=lambda each: isinstance(each, Call)):
            if not is_call:
                yield from some  # type: ignore[misc]
                continue
            calls: list[Any] = list(some)
            for start in range(0, len(calls), MOST_ROWS):
                part = calls[start : start + MOST_ROWS]
                yield partial(write_calls, tables=self._tables, calls=part)


class Batches:
    """The batches of one outbox.

    Arguments:
        tables: the outbox tables.
        write: runs steps in one transaction.
    """

    def __init__(self, tables: Tables, write: Callable[..., None]) -> None:
        self._tables = tables
        self._write = write
        self._current: ContextVar[Batch | None] = ContextVar("outbox_batch", default=None)

    def here(self) -> Batch | None:
        """The batch that a call made here belongs to; ``None``: it is written by itself."""
        batch = self._current.get()
        return batch if batch is not None and batch.takes_calls else None

    @contextmanager
    def together(self, *, lazy: bool = False, began: float | None = None) -> Iterator[None]:
        """Write the calls of this block, as far as they come with no transaction, in one at its
        end, and none of them after an exception. A block inside another one is a part of it.

        Arguments:
            lazy, began: see :class:`Batch`.

        Raises:
            RecordError, sqlalchemy.exc.DBAPIError: at the end: they cannot be written.
        """
        if self.here() is not None:
            yield
            return
        began = time.monotonic() if began is None else began
        batch = Batch(self._tables, self._write, lazy=lazy, began=began)
        token = self._current.set(batch)
        try:
            yield
        finally:
            self._current.reset(token)
            batch.close()
        batch.write()


def _here() -> tuple[int, int, Any, Any]:
    """The process, the thread or greenlet, the asynchronous task and the job that runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return os.getpid(), threading.get_ident(), task, running_job.get()
