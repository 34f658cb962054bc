"""Imported by Python at the start of a program whose clock is wrong; see ``wrong_clock``."""

from __future__ import annotations

import select
import time


def _sleep(seconds: float) -> None:
    select.select([], [], [], seconds)


# Python 3.11 sleeps by clock_nanosleep() until a time of the monotonic clock. libfaketime takes
# that for one of the clock that it changes, and the call fails.
time.sleep = _sleep
