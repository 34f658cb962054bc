"""What all contenders do around the thing that is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from threading import Event

#: A second argument of every call, beside its number.
PERIOD = "2026-01"

#: A call's begin and end of the commit, in nanoseconds of the monotonic clock.
Stamps = list[tuple[int, int, int]]


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def paced(
    numbers: range, per_second: float, prepare: Callable[[int], Callable[[], object]]
) -> Stamps:
    """Do something again and again, at about this rate, and note when.

    Arguments:
        prepare: gets the number; returns what is timed.
    """
    # Uneven, so that it does not run in step with anybody's polling; the same each time.
    dice, pause, stamps = Random(numbers.start), Event(), []
    for number in numbers:
        pause.wait(dice.uniform(0.5, 1.5) / per_second)
        timed = prepare(number)
        began = time.monotonic_ns()
        timed()
        stamps.append((number, began, time.monotonic_ns()))
    return stamps
