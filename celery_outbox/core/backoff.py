"""Pauses that grow in an outage."""

from __future__ import annotations


class Backoff:
    """Doubles from ``first`` to ``ceiling`` seconds; half of each pause is random, so that
    dispatchers that lost the same broker do not come back in step.

    Arguments:
        first: seconds of the first pause.
        ceiling: seconds of the longest pause.
    """

    def __init__(self, first: float, ceiling: float) -> None:
        self._first = min(first, ceiling)
        self._ceiling = ceiling
        self._failures = 0

    def next(self, random: float) -> float:
        """The next pause in seconds; ``random`` lies in [0, 1)."""
        full = min(self._first * 2.0 ** min(self._failures, 32), self._ceiling)
        self._failures += 1
        return full * (1 - random / 2)

    def reset(self) -> None:
        """The other side is back."""
        self._failures = 0
