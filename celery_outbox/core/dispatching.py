"""What a dispatcher does with an outbox row that is due: a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from celery_outbox.core.states import FINAL_STATES, State


@dataclass(frozen=True)
class Publish:
    """Send it to the broker."""


@dataclass(frozen=True)
class Obsolete:
    """The job needs no message any more."""


@dataclass(frozen=True)
class Postpone:
    """A worker holds the job: look again at ``until``."""

    until: datetime


@dataclass(frozen=True)
class Overdue:
    """The job's time is over."""


def plan(
    *,
    is_copy: bool,
    state: State,
    leased_until: datetime | None,
    expires_at: datetime | None,
    now: datetime,
) -> Publish | Obsolete | Postpone | Overdue:
    """What to do with a row that is due.

    Arguments:
        is_copy: the row is a copy for the quarantine queue, which is sent in any state.
        state: the job's state.
        leased_until: end of a running job's lease.
        expires_at: when the job's time is over.
        now: the database's clock.
    """
    if is_copy:
        return Publish()
    if state in FINAL_STATES or state is State.REPLACED:
        return Obsolete()
    if state is State.RUNNING:
        if leased_until is not None and leased_until > now:
            return Postpone(leased_until)
        return Publish()
    if expires_at is not None and expires_at <= now:
        return Overdue()
    return Publish()
