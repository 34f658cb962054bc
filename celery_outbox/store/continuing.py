"""A job that goes on as other jobs (``self.replace`` with a chain, group or chord)."""

from __future__ import annotations

from sqlalchemy import Connection

from celery_outbox.core.states import State, Transition
from celery_outbox.store import messages
from celery_outbox.store.applying import NO_LEASE, apply, note
from celery_outbox.store.clock import db_moment
from celery_outbox.store.job import Job
from celery_outbox.store.recording import NewJob
from celery_outbox.store.schema import Tables

#: Celery's header that counts how often a job was replaced; each step of a replacement has it.
NESTING = "replaced_task_nesting"


def replace(
    connection: Connection, tables: Tables, job_id: str, token: int, *, attempt: int, actor: str
) -> bool:
    """End the attempt because the body went on as jobs the last of which will have this id.

    Returns:
        Whether it took effect; ``False``: the lease was lost.
    """
    took = apply(
        connection,
        tables,
        Transition.REPLACE,
        job_id,
        [tables.job.c.lease_token == token],
        **NO_LEASE,
        part=tables.job.c.part + 1,
        attempts_before=attempt,
        error_code=None,
        error_detail=None,
    )
    if took:
        messages.drop_pending(connection, tables, job_id)
        note(connection, tables, Transition.REPLACE, job_id, attempt, actor)
    return took


def goes_on_as(job: Job, new: NewJob) -> bool:
    """Whether ``new`` is the step that a replaced job waits for, and not a second one of a
    replacement before."""
    return job.state is State.REPLACED and nesting(new) > _nesting(job)


def was_replaced(job: Job) -> bool:
    """Whether a job is the last step of a replacement, or would have become it had it not been
    cancelled, so that its task may have changed."""
    return job.state is State.REPLACED or job.attempts_before > 0 or _nesting(job) > 0


def nesting(new: NewJob) -> int:
    """How many replacements led to a recording."""
    return int(new.envelope.headers.get(NESTING) or 0)


def _nesting(job: Job) -> int:
    return int(job.envelope.headers.get(NESTING) or 0)


def go_on(connection: Connection, tables: Tables, job: Job, new: NewJob, *, actor: str) -> bool:
    """Give a replaced job the message of the last step.

    Its attempts count on, so that a message of an earlier one is known for what it is; the step
    gets all the attempts that its task has.

    Returns:
        Whether it took effect; ``False``: somebody else has recorded this step.
    """
    due_at = db_moment(new.available_at)
    took = apply(
        connection,
        tables,
        Transition.CONTINUE,
        job.id,
        [tables.job.c.lease_token == job.lease_token],
        task=new.task,
        queue=new.queue,
        envelope=new.envelope_json,
        body=new.body,
        relay=int(new.relay),
        max_attempts=job.attempt + new.max_attempts,
        available_at=due_at,
        expires_at=new.expires_at,
        result_key=new.result_key,
        chord_id=new.chord_id,
        chord_position=new.chord_position,
    )
    if took:
        now = new.available_at is None
        messages.add(connection, tables, job.id, due_at=None if now else due_at, wake=now)
        note(connection, tables, Transition.CONTINUE, job.id, job.attempt, actor)
    return took
