"""The transitions of jobs whose task is another service's, or was taken for one."""

from __future__ import annotations

from sqlalchemy import Connection, update

from celery_outbox.core.states import WAITING_STATES, Transition
from celery_outbox.store.applying import NOT_FINAL, apply, note
from celery_outbox.store.clock import db_now
from celery_outbox.store.job import Job
from celery_outbox.store.schema import Tables


def relay(connection: Connection, tables: Tables, job_id: str, *, attempt: int, actor: str) -> bool:
    """End a job of another service, whose message the broker has confirmed.

    Not one that a worker of ours has claimed since the message was sent.
    """
    theirs = [tables.job.c.relay == 1]
    took = apply(connection, tables, Transition.RELAY, job_id, theirs, finished_at=db_now())
    if took:
        note(connection, tables, Transition.RELAY, job_id, attempt, actor)
    return took


def adopt_relayed(
    connection: Connection,
    tables: Tables,
    job: Job,
    *,
    max_attempts: int,
    result_key: str | None,
    actor: str,
) -> bool:
    """Make a relayed job ours: a worker of ours has its message, and the task.

    Arguments:
        max_attempts, result_key: as the task says, which the caller's process did not know.
    """
    took = apply(
        connection,
        tables,
        Transition.ADOPT,
        job.id,
        [],
        **NOT_FINAL,
        relay=0,
        max_attempts=max_attempts,
        result_key=result_key,
    )
    if took:
        note(connection, tables, Transition.ADOPT, job.id, job.attempt, actor)
    return took


def keep_from_relaying(
    connection: Connection,
    tables: Tables,
    job: Job,
    *,
    max_attempts: int,
    result_key: str | None,
) -> bool:
    """Make a locked job ours whose message was faster than the dispatcher's note that it went
    out; for the arguments see :func:`adopt_relayed`."""
    column = tables.job.c
    statement = (
        update(tables.job)
        .where(column.id == job.id, column.state.in_([str(state) for state in WAITING_STATES]))
        .values(relay=0, max_attempts=max_attempts, result_key=result_key)
    )
    return bool(connection.execute(statement).rowcount == 1)
