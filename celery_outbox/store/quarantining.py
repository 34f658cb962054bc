"""The transitions of a job into quarantine, and by a person out of it."""

from __future__ import annotations

from sqlalchemy import Connection

from celery_outbox.core.reasons import Reason, Source
from celery_outbox.core.states import WAITING_STATES, State, Transition
from celery_outbox.store import messages
from celery_outbox.store.applying import NO_LEASE, NOT_FINAL, apply, note
from celery_outbox.store.clock import db_now
from celery_outbox.store.job import Job
from celery_outbox.store.schema import Tables


def quarantine(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    reason: Reason,
    error_code: str | None,
    error_detail: str | None = None,
    copy: bool,
    report: bool = False,
) -> bool:
    """End the attempt for good.

    Arguments:
        copy: send a copy of the message to the quarantine queue through the outbox, because
            the broker does not do it.
        report: no worker may be there that tells Celery's side: the maintenance does.
    """
    took = apply(
        connection,
        tables,
        Transition.QUARANTINE,
        job_id,
        [tables.job.c.state == str(State.RUNNING), tables.job.c.lease_token == token],
        **NO_LEASE,
        reason=str(reason),
        source=str(Source.SETTLE),
        error_code=error_code,
        error_detail=error_detail,
        finished_at=db_now(),
        report_at=db_now() if report else None,
    )
    if took:
        _quarantined(connection, tables, job_id, attempt, actor, reason, error_code, copy=copy)
    return took


def quarantine_waiting(
    connection: Connection,
    tables: Tables,
    job_id: str,
    *,
    attempt: int,
    actor: str,
    reason: Reason,
    error_code: str | None = None,
    copy: bool,
    report: bool = True,
    relayed: bool = False,
) -> bool:
    """Quarantine a job that waits, because no worker can get or read its message.

    Arguments:
        report: the maintenance is to tell Celery's side; ``False``: the caller does.
        relayed: also a job that counts as relayed.
    """
    waiting = [str(state) for state in WAITING_STATES]
    if relayed:
        waiting.append(str(State.RELAYED))
    took = apply(
        connection,
        tables,
        Transition.QUARANTINE,
        job_id,
        [tables.job.c.state.in_(waiting)],
        reason=str(reason),
        source=str(Source.BROKER),
        error_code=error_code,
        finished_at=db_now(),
        report_at=db_now() if report else None,
    )
    if took:
        _quarantined(connection, tables, job_id, attempt, actor, reason, error_code, copy=copy)
    return took


def replay(
    connection: Connection, tables: Tables, job: Job, *, relay: bool = False, actor: str
) -> bool:
    """Send a quarantined job back to the queue, with all its attempts before it.

    Arguments:
        relay: its message goes out in full, because its task has no guard.
    """
    took = apply(
        connection,
        tables,
        Transition.REPLAY,
        job.id,
        [],
        **NOT_FINAL,
        relay=int(relay),
        attempt=0,
        attempts_before=0,
        max_attempts=job.max_attempts - job.attempts_before,
        error_code=None,
        error_detail=None,
        available_at=db_now(),
        expires_at=None,
    )
    if took:
        messages.add(connection, tables, job.id, wake=True)
        note(connection, tables, Transition.REPLAY, job.id, 0, actor)
    return took


def discard(connection: Connection, tables: Tables, job: Job, *, actor: str) -> bool:
    """Give a quarantined job up; the journal keeps why it was there."""
    took = apply(
        connection,
        tables,
        Transition.DISCARD,
        job.id,
        [],
        reason=None,
        source=None,
        finished_at=db_now(),
    )
    if took:
        note(connection, tables, Transition.DISCARD, job.id, job.attempt, actor)
    return took


def _quarantined(
    connection: Connection,
    tables: Tables,
    job_id: str,
    attempt: int,
    actor: str,
    reason: Reason,
    error_code: str | None,
    *,
    copy: bool,
) -> None:
    messages.drop_pending(connection, tables, job_id)
    if copy:
        messages.add(connection, tables, job_id, kind=messages.QUARANTINE, wake=True)
    note(
        connection,
        tables,
        Transition.QUARANTINE,
        job_id,
        attempt,
        actor,
        reason=str(reason),
        error_code=error_code,
    )
