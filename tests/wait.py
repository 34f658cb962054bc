"""Waiting for a condition, in place of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def eventually(
    check: Callable[[], T],
    *,
    deadline: float = 30.0,
    interval: float = 0.05,
    message: str | Callable[[], str] = "the condition did not come true",
) -> T:
    """Call ``check`` until it returns something true, and return that.

    :param check: called at least once; an exception counts as "not yet".
    :param deadline: how long to go on, in seconds.
    :param interval: the pause between two calls, in seconds.
    :param message: what to say on failure; a callable is asked only then.
    :raises AssertionError: at the deadline, with the last value; the last exception is its cause.
    """
    end = time.monotonic() + deadline
    while True:
        error: Exception | None = None
        value: T | None = None
        try:
            value = check()
            if value:
                return value
        except Exception as caught:
            error = caught
        if time.monotonic() >= end:
            text = message() if callable(message) else message
            last = f"last value {value!r}" if error is None else f"last error {error!r}"
            raise AssertionError(f"{text} within {deadline:g} s; {last}") from error
        time.sleep(interval)


def wait_for_file(path: Path, seconds: float) -> None:
    """Wait in a task's body, where an exception that ends the body must come through.

    :raises TimeoutError: the file is not there in time.
    """
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.02)
