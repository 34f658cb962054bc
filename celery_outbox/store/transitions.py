"""The transitions of an existing job on its way from the queue to its end: one function each.

A function that ends a running attempt names the attempt's lease token and reports whether it
took effect: ``False`` means that the lease was lost and that nothing was written.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, case, null, or_, update

from celery_outbox.core.part import Part
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State, Transition
from celery_outbox.store import messages
from celery_outbox.store.applying import NO_LEASE, apply, note
from celery_outbox.store.clock import db_after, db_moment, db_now
from celery_outbox.store.job import Job
from celery_outbox.store.postgresql.running import succeed_in_one
from celery_outbox.store.recording import NewJob
from celery_outbox.store.schema import Tables


def claim(
    connection: Connection,
    tables: Tables,
    job: Job,
    *,
    actor: str,
    lease: float,
    nonce: int | None = None,
) -> int:
    """Take a locked job under a lease.

    Arguments:
        job: the row as it was locked.
        actor: the worker.
        lease: seconds until the lease ends without a heartbeat.
        nonce: a number that no other claim has.

    Returns:
        The lease token of this attempt, or 0: it may not be taken.
    """
    column = tables.job.c
    took = apply(
        connection,
        tables,
        Transition.CLAIM,
        job.id,
        [
            column.lease_token == job.lease_token,
            or_(column.state != str(State.RUNNING), column.leased_until <= db_now()),
        ],
        attempt=column.attempt + 1,
        deliveries=column.deliveries + 1,
        lease_token=column.lease_token + 1,
        lease_nonce=nonce,
        # Whatever its caller knew: the task is ours.
        relay=0,
        leased_by=actor,
        leased_until=db_after(lease),
        started_at=db_now(),
    )
    if not took:
        return 0
    if job.state is State.RUNNING:
        # The worker of the attempt before went away, and this delivery came before maintenance.
        lost = str(Reason.LOST_WORKER)
        note(connection, tables, Transition.RESCUE, job.id, job.attempt, actor, error_code=lost)
    note(connection, tables, Transition.CLAIM, job.id, job.attempt + 1, actor)
    return job.lease_token + 1


def succeed(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    result: bytes | None,
    result_type: str | None,
) -> bool:
    """End the attempt with its result: the state and the result are one write."""
    if connection.dialect.name == "postgresql":
        return succeed_in_one(
            connection,
            tables,
            job_id,
            token,
            attempt=attempt,
            actor=actor,
            result=result,
            result_type=result_type,
        )
    column = tables.job.c
    took = apply(
        connection,
        tables,
        Transition.SUCCEED,
        job_id,
        [tables.job.c.lease_token == token],
        **NO_LEASE,
        result=result,
        result_type=result_type,
        error_code=None,
        error_detail=None,
        finished_at=db_now(),
        # What only begins a chain hands over to the next step.
        chord_id=case((column.chord_position.is_not(None), column.chord_id), else_=null()),
    )
    if took:
        messages.drop_pending(connection, tables, job_id)
        note(connection, tables, Transition.SUCCEED, job_id, attempt, actor)
    return took


def keep_result(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    result: bytes | None,
    result_type: str | None,
) -> bool:
    """Store the result of an attempt that ended its job before its result was known."""
    column = tables.job.c
    statement = (
        update(tables.job)
        .where(
            column.id == job_id,
            column.state == str(State.SUCCEEDED),
            column.lease_token == token,
        )
        .values(result=result, result_type=result_type)
    )
    return bool(connection.execute(statement).rowcount == 1)


def retry(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    error_code: str | None,
    error_detail: str | None = None,
    delay: float = 0.0,
) -> bool:
    """End the attempt and put the next one into the outbox, due in ``delay`` seconds."""
    return _next_attempt(
        connection,
        tables,
        Transition.RETRY,
        job_id,
        token,
        attempt=attempt,
        actor=actor,
        due_at=db_after(delay),
        error_code=error_code,
        error_detail=error_detail,
    )


def rescue(connection: Connection, tables: Tables, job: Job, *, actor: str, delay: float) -> bool:
    """Take back a locked job whose lease has ended; it is due again in ``delay`` seconds."""
    return _next_attempt(
        connection,
        tables,
        Transition.RESCUE,
        job.id,
        job.lease_token,
        attempt=job.attempt,
        actor=actor,
        due_at=db_after(delay),
        error_code=str(Reason.LOST_WORKER),
    )


def resume_as(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    new: NewJob,
    part: Part,
    error_code: str | None,
) -> bool:
    """End the attempt because the body itself asked to go on later (``self.retry``).

    The message that the body sent replaces the stored one.

    Arguments:
        part: of the job's life, that the next attempt is in.
    """
    return _next_attempt(
        connection,
        tables,
        Transition.RETRY,
        job_id,
        token,
        attempt=attempt,
        actor=actor,
        due_at=db_moment(new.available_at),
        error_code=error_code,
        task=new.task,
        queue=new.queue,
        envelope=new.envelope_json,
        body=new.body,
        expires_at=new.expires_at,
        result_key=new.result_key,
        part=part.number,
        attempts_before=part.attempts_before,
        max_attempts=part.max_attempts,
        relay=int(new.relay),
    )


def cancel(connection: Connection, tables: Tables, job: Job, *, actor: str) -> bool:
    """Take a waiting job back before it runs."""
    return _end_waiting(connection, tables, Transition.CANCEL, job.id, job.attempt, actor)


def expire(
    connection: Connection,
    tables: Tables,
    job_id: str,
    *,
    attempt: int,
    actor: str,
    report: bool = True,
) -> bool:
    """End a waiting job whose time is over.

    Arguments:
        report: the maintenance is to tell Celery's side; ``False``: the caller does.
    """
    return _end_waiting(connection, tables, Transition.EXPIRE, job_id, attempt, actor, report)


def count_delivery(
    connection: Connection, tables: Tables, job: Job, *, event: str, actor: str
) -> None:
    """Count a delivery that starts no attempt, and say in the journal what it was."""
    add_delivery(connection, tables, job.id)
    note(connection, tables, event, job.id, job.attempt, actor, state=job.state)


def add_delivery(connection: Connection, tables: Tables, job_id: str) -> None:
    """Count a delivery whose journal line is written by what it led to."""
    column = tables.job.c
    connection.execute(
        update(tables.job).where(column.id == job_id).values(deliveries=column.deliveries + 1)
    )


def defer(connection: Connection, tables: Tables, job: Job, *, until: datetime, actor: str) -> None:
    """Send the job's message again at ``until``, unless one is on its way already."""
    if not messages.has_pending(connection, tables, job.id):
        messages.add(connection, tables, job.id, due_at=until)
    count_delivery(connection, tables, job, event="deferred", actor=actor)


def _next_attempt(
    connection: Connection,
    tables: Tables,
    transition: Transition,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    due_at: Any,
    error_code: str | None,
    error_detail: str | None = None,
    **values: Any,
) -> bool:
    took = apply(
        connection,
        tables,
        transition,
        job_id,
        [tables.job.c.lease_token == token],
        **NO_LEASE,
        available_at=due_at,
        error_code=error_code,
        error_detail=error_detail,
        **values,
    )
    if took:
        # A row that was deferred to the lease's end would only come too late or too early.
        messages.drop_pending(connection, tables, job_id)
        messages.add(connection, tables, job_id, due_at=due_at)
        note(connection, tables, transition, job_id, attempt, actor, error_code=error_code)
    return took


def _end_waiting(
    connection: Connection,
    tables: Tables,
    transition: Transition,
    job_id: str,
    attempt: int,
    actor: str,
    report: bool = False,
) -> bool:
    report_at = db_now() if report else None
    took = apply(
        connection,
        tables,
        transition,
        job_id,
        [],
        finished_at=db_now(),
        report_at=report_at,
    )
    if took:
        messages.drop_pending(connection, tables, job_id)
        note(connection, tables, transition, job_id, attempt, actor)
    return took
