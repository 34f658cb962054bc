"""Waiting for a condition: bounded, for each one and for all together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

#: Seconds between two looks.
INTERVAL = 0.05


class TimedOut(Exception):
    """A condition did not come true in time."""


class Patience:
    """Waits, and knows when the whole demonstration has to end.

    Arguments:
        total: seconds for everything.
        each: seconds for one condition.
    """

    def __init__(self, total: float, each: float = 25.0) -> None:
        self._end = time.monotonic() + total
        self._each = each

    def until(self, what: str, check: Callable[[], Found | None]) -> Found:
        """Look until ``check`` returns something true, and return that.

        Raises:
            TimedOut: it did not; ``what`` says what was waited for.
        """
        started = time.monotonic()
        end = min(self._end, started + self._each)
        while True:
            found = check()
            if found:
                return found
            if time.monotonic() >= end:
                raise TimedOut(f"waited {time.monotonic() - started:.0f} s for {what}")
            time.sleep(INTERVAL)
