"""What a worker does with a delivery: a pure function of the job's row and the delivery."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State


@dataclass(frozen=True)
class JobFacts:
    """What the decision needs to know of a job."""

    state: State
    attempt: int
    max_attempts: int
    leased_until: datetime | None = None
    available_at: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True)
class Run:
    """Claim the job and run its body."""


@dataclass(frozen=True)
class ReturnStored:
    """The job has succeeded: hand Celery the stored result, so that lost callbacks go out."""


@dataclass(frozen=True)
class FailAgain:
    """The job is quarantined and this delivery may be the one that was never rejected.

    Attributes:
        copied: a copy went to the quarantine queue already; reject would make a second one.
    """

    copied: bool = False


@dataclass(frozen=True)
class Defer:
    """It is not this job's time: come back through the database at ``until``."""

    until: datetime


@dataclass(frozen=True)
class GiveUpLost:
    """The last permitted attempt ended with its worker."""

    reason: Reason = Reason.LOST_WORKER


@dataclass(frozen=True)
class Expire:
    """The job's time is over before it ran."""


@dataclass(frozen=True)
class Drop:
    """Acknowledge; nothing is left to do."""


@dataclass(frozen=True)
class Unknown:
    """No job has this id."""


@dataclass(frozen=True)
class Mismatch:
    """The job with this id is of another task."""


Decision = Mismatch | Run | ReturnStored | FailAgain | Defer | GiveUpLost | Expire | Drop | Unknown


def decide(
    job: JobFacts | None,
    *,
    now: datetime,
    redelivered: bool,
    copied: bool = False,
    same_task: bool = True,
    outdated: bool = False,
) -> Decision:
    """What a worker does with a delivery.

    Arguments:
        job: the job's row, locked; ``None`` when there is none.
        now: the database's clock.
        redelivered: the broker says that it delivered this message before.
        same_task: the message names the task that the job has.
        outdated: the message is of an earlier attempt, since which the job may have become one of
            another task (``self.replace``).
        copied: a copy of the quarantined job went to the quarantine queue through the outbox.
    """
    if job is None:
        return Unknown()
    if not same_task:
        return Drop() if outdated else Mismatch()
    if job.state is State.SUCCEEDED:
        return ReturnStored()
    if job.state is State.QUARANTINED:
        # A worker that died between settle and reject leaves a message that the broker
        # delivers again; a second copy of the message is a duplicate and nothing more.
        return FailAgain(copied) if redelivered else Drop()
    if job.state in (State.CANCELLED, State.EXPIRED, State.RELAYED, State.REPLACED):
        # A replaced job goes on with another message, which is recorded when it is its turn.
        return Drop()
    if job.state is State.RUNNING:
        if job.leased_until is not None and job.leased_until > now:
            return Defer(job.leased_until)
        # The lease ended without a settle: that attempt is spent.
        return GiveUpLost() if job.attempt >= job.max_attempts else Run()
    if job.expires_at is not None and job.expires_at <= now:
        return Expire()
    if job.available_at is not None and job.available_at > now:
        # A leftover copy of an earlier attempt's message must not shorten a retry's delay.
        return Defer(job.available_at)
    return Run()
