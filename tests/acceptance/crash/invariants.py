"""What must hold for every job after every crash."""

from __future__ import annotations

from collections.abc import Sequence

from celery_outbox.core.states import TRANSITIONS, State, Transition
from celery_outbox.store.job import Job
from celery_outbox.store.journal import Event

#: Lines that are written with a delivery that starts no attempt.
_DELIVERIES = ("duplicate", "deferred", "mismatch")


def gaps(events: Sequence[Event], job: Job) -> list[str]:
    """Why a journal does not tell the whole story of a job; empty: it does.

    Each transition starts where the one before it ended, attempts are counted one by one, and the
    last line is what the job's row says.
    """
    found: list[str] = []
    state: State | None = None
    attempt = 0
    names = {str(transition): transition for transition in Transition}
    for event in events:
        transition = names.get(event.event)
        if transition is None:
            if event.state is not None and event.state != state:
                found.append(f"{event.event} says {event.state} while the job is {state}")
            continue
        allowed, target = TRANSITIONS[transition]
        if state not in allowed:
            found.append(f"{event.event} from {state}")
        if event.state != target:
            found.append(f"{event.event} says {event.state}, not {target}")
        state = target
        attempt += transition is Transition.CLAIM
        if event.attempt != attempt:
            found.append(f"{event.event} says attempt {event.attempt}, not {attempt}")
    if (state, attempt) != (job.state, job.attempt):
        found.append(f"it ends with {state}, {attempt}; the row has {job.state}, {job.attempt}")
    return found


def broken(events: Sequence[Event], job: Job) -> list[str]:
    """Everything that is wrong with a job that has ended, and with its journal."""
    found = gaps(events, job)
    claims = sum(event.event == str(Transition.CLAIM) for event in events)
    others = sum(event.event in _DELIVERIES for event in events)
    if job.attempt > job.max_attempts:
        found.append(f"{job.attempt} attempts of {job.max_attempts}")
    if job.lease_token != claims:
        found.append(f"{claims} claims, lease token {job.lease_token}")
    # A worker that finds the last attempt lost counts its delivery with the end of the job.
    if not 0 <= job.deliveries - claims - others <= (job.state is State.QUARANTINED):
        found.append(f"{job.deliveries} deliveries, {claims} claims, {others} others")
    if job.leased_by is not None or job.leased_until is not None:
        found.append(f"it has ended, and {job.leased_by} holds it")
    return found
