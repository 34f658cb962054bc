"""How long a failed job waits, and when it stops being tried."""

from __future__ import annotations

import math
from dataclasses import dataclass

from celery_outbox.core.classification import MAX_PAUSE, Verdict
from celery_outbox.core.reasons import Reason


@dataclass(frozen=True)
class RetryPolicy:
    """When an attempt that failed is followed by another one.

    The delay before attempt *n + 1* is ``delay * factor ** (n - 1)`` seconds, at most
    ``max_delay``, of which the share ``jitter`` is random, so that jobs that failed together
    do not come back together (AWS Architecture Blog, "Exponential Backoff And Jitter").

    Arguments:
        max_attempts: attempts in all, the first included; at least 1.
        delay: seconds before the second attempt; not negative.
        factor: growth from one delay to the next; at least 1.
        max_delay: ceiling of a delay in seconds.
        jitter: share of each delay that is random, 0 (none) to 1 (all of it).

    Raises:
        ValueError: an argument is outside its range.
    """

    max_attempts: int = 3
    delay: float = 5.0
    factor: float = 2.0
    max_delay: float = 600.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts!r}")
        for seconds in (self.delay, self.factor, self.max_delay):
            if not math.isfinite(seconds):
                raise ValueError(f"{seconds!r} is not a finite number")
        if self.delay < 0 or self.max_delay < 0:
            raise ValueError("delay and max_delay are seconds and cannot be negative")
        if self.factor < 1:
            raise ValueError(f"factor must be at least 1, not {self.factor!r}")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter is a share between 0 and 1, not {self.jitter!r}")

    def delay_after(self, attempt: int, random: float) -> float:
        """Seconds to wait after ``attempt`` (1 is the first); ``random`` lies in [0, 1)."""
        try:
            full = min(self.delay * self.factor ** max(attempt - 1, 0), self.max_delay)
        except OverflowError:
            full = self.max_delay if self.delay else 0.0
        return min(full * (1 - self.jitter * random), MAX_PAUSE)


@dataclass(frozen=True)
class RetryIn:
    """Another attempt follows after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True)
class GiveUp:
    """No attempt follows; the job goes to quarantine."""

    reason: Reason


def after_failure(
    verdict: Verdict,
    *,
    attempt: int,
    max_attempts: int,
    attempts_before: int = 0,
    policy: RetryPolicy,
    random: float,
) -> RetryIn | GiveUp:
    """What follows an attempt that failed with ``verdict``.

    Arguments:
        attempt: the number of the attempt that failed, 1 for the first.
        max_attempts: the job's own limit, which may differ from the policy's.
        attempts_before: how many of the attempts were those of another call, which the present one
            has replaced; delays grow from there.
        random: a number in [0, 1) for the jitter.
    """
    if verdict.permanent:
        return GiveUp(verdict.reason or Reason.PERMANENT)
    if attempt >= max_attempts:
        return GiveUp(verdict.reason or Reason.ATTEMPTS_EXHAUSTED)
    delay = policy.delay_after(attempt - attempts_before, random)
    if verdict.retry_after is not None:
        # What the other side asks for is a lower bound: coming earlier is refused again.
        delay = max(delay, verdict.retry_after)
    return RetryIn(delay)
