"""Every way for a body to end that does no harm to others, by name; and the tasks that try them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded
from greenlet import GreenletExit

if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup
else:
    # pytest brings it along.
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup


class Unpicklable(Exception):
    """Carries what no process can send to another."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())


class Unbuildable(Exception):
    """Can be pickled, but not be built again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class HostileText(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no str")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class HostileReduce(Exception):
    """Cannot be taken apart."""

    def __reduce__(self) -> Any:
        raise RuntimeError("no reduce")


class HostileResult:
    """A result that cannot be stored, sent or shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __reduce__(self) -> Any:
        raise RuntimeError("no reduce")


def _recurse() -> Any:
    return _recurse()


def _close_and_move() -> str:
    sys.stdout.close()
    os.chdir(tempfile.gettempdir())
    return "left"


def _raise(error: BaseException) -> Any:
    raise error


def _catch_the_soft_limit() -> str:
    try:
        time.sleep(60)
    except SoftTimeLimitExceeded:
        return "caught"
    return "slept"


ENDINGS: dict[str, Callable[[], Any]] = {
    "returns": lambda: "fine",
    "closes-stdout-and-moves": _close_and_move,
    "sys-exit": lambda: sys.exit(3),
    "keyboard-interrupt": lambda: _raise(KeyboardInterrupt()),
    "cancelled-error": lambda: _raise(asyncio.CancelledError()),
    "greenlet-exit": lambda: _raise(GreenletExit()),
    "memory-error": lambda: _raise(MemoryError("all of it")),
    "recursion-error": _recurse,
    "exception-group": lambda: _raise(ExceptionGroup("two", [OSError("a"), OSError("b")])),
    "base-exception-group": lambda: _raise(BaseExceptionGroup("two", [SystemExit(1)])),
    "unpicklable": lambda: _raise(Unpicklable()),
    "unbuildable": lambda: _raise(Unbuildable("a", "b")),
    "hostile-text": lambda: _raise(HostileText("x")),
    "hostile-reduce": lambda: _raise(HostileReduce("x")),
    "hostile-result": HostileResult,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "os-exit": lambda: os._exit(0),
    "hard-limit": lambda: time.sleep(60),
    "soft-limit": lambda: time.sleep(60),
    "soft-limit-caught": _catch_the_soft_limit,
}


def register(task: Callable[..., Any], note_run: Callable[..., None]) -> None:
    """Register the tasks with an app.

    :param task: the app's decorator.
    :param note_run: leaves a trace of a run.
    """

    @task(name="shop.end", max_attempts=2)
    def end(self: Any, how: str) -> Any:
        """End in a way of this file."""
        note_run(self.request.id)
        return ENDINGS[how]()

    @task(name="shop.end_ignored", max_attempts=2, ignore_result=True)
    def end_ignored(self: Any, how: str) -> Any:
        """End, and have Celery store nothing of it."""
        return ENDINGS[how]()

    @task(
        name="shop.end_noted", max_attempts=1, ignore_result=True, store_errors_even_if_ignored=True
    )
    def end_noted(self: Any, how: str) -> Any:
        """End, and have Celery store the error alone."""
        return ENDINGS[how]()

    @task(
        name="shop.end_stubborn",
        max_attempts=2,
        acks_late=False,
        acks_on_failure_or_timeout=True,
        reject_on_worker_lost=True,
    )
    def end_stubborn(self: Any, how: str) -> Any:
        """End with options that lose jobs, or deliver them for ever, where they are obeyed."""
        note_run(self.request.id)
        return ENDINGS[how]()

    @task(name="shop.end_late", on_success=lambda self, *args: sys.exit(1))
    def end_late(self: Any) -> str:
        """Leave the process when everything is over."""
        note_run(self.request.id)
        return "done"

    @task(name="shop.who")
    def who(self: Any) -> list[int]:
        """Say which process runs this, and which of the database's processes serves it."""
        with self.outbox.engine.connect() as connection:
            backend = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        return [os.getpid(), backend]
