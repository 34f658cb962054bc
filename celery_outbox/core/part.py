"""The parts of a job's life: what begins a new one, and what counts from there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of a job's life, from one deliberate continuation to the next.

    Attributes:
        number: 0 for the first. Calls of the body are told apart by it: an attempt that runs again
            is in the same part, and makes the same calls.
        attempts_before: attempts that the job had when its present call began (``self.replace``).
            Celery counts retries from there.
        max_attempts: attempts that the job may have in all.
    """

    number: int
    attempts_before: int
    max_attempts: int

    def again(self, attempt: int, allowed: int) -> Part:
        """What follows an attempt that failed and whose body asked for another one by hand.

        One more is permitted at least: whoever asks for it by hand has a limit of his own.

        Arguments:
            attempt: the number of the attempt that ends.
            allowed: attempts that the task has.
        """
        limit = max(self.attempts_before + allowed, attempt + 1)
        return Part(self.number, self.attempts_before, limit)

    def on(self, attempt: int, allowed: int) -> Part:
        """What follows an attempt whose body wants to be called again, as in a poll loop."""
        return Part(self.number + 1, self.attempts_before, attempt + allowed)

    def replaced(self, attempt: int, allowed: int) -> Part:
        """What follows an attempt whose body is replaced by another call."""
        return Part(self.number + 1, attempt, attempt + allowed)
