"""Whether a step of a job, seen from outside, is one of the table's."""

from __future__ import annotations

from celery_outbox.core.states import TRANSITIONS, State


def is_allowed(before: State | None, after: State) -> bool:
    """Whether any transition leads from ``before`` (``None``: no job) to ``after``."""
    return any(before in allowed and end is after for allowed, end in TRANSITIONS.values())
