"""Jobs whose message the broker has lost: published, and claimed by no worker."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, case, func, select

from celery_outbox.core.states import State
from celery_outbox.store import messages
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.schema import Tables


def unclaimed_queues(
    connection: Connection, tables: Tables, after: float
) -> list[tuple[str | None, int]]:
    """Queues that have a job whose message was published ``after`` seconds ago and that no
    worker has claimed, with the number of all jobs published to them and not claimed."""
    job = tables.job
    published = messages.published_at(tables)
    overdue = func.sum(case((published <= db_after(-after), 1), else_=0))
    statement = (
        select(job.c.queue, func.count())
        .where(_waits_without_a_message(tables), job.c.available_at <= db_now())
        .where(published.is_not(None))
        .group_by(job.c.queue)
        .having(overdue > 0)
    )
    return [(row[0], int(row[1])) for row in connection.execute(statement)]


def publish_again(
    connection: Connection,
    tables: Tables,
    queue: str | None,
    *,
    after: float,
    limit: int,
) -> list[str]:
    """Give jobs of a queue a new message whose last one was published ``after`` seconds ago and
    that no worker has claimed; the longest waiting first.

    Returns:
        The ids of these jobs.
    """
    job = tables.job
    statement = (
        select(job.c.id)
        .where(
            _waits_without_a_message(tables),
            job.c.available_at <= db_after(-after),
            messages.published_at(tables) <= db_after(-after),
            job.c.queue.is_(None) if queue is None else job.c.queue == queue,
        )
        .order_by(job.c.available_at)
        .limit(limit)
        .with_for_update(of=job, skip_locked=True)
    )
    ids = list(connection.execute(statement).scalars())
    for job_id in ids:
        messages.add(connection, tables, job_id, wake=True)
    return ids


def _waits_without_a_message(tables: Tables) -> Any:
    job, message = tables.job, tables.message
    pending = (
        select(message.c.id)
        .where(
            message.c.job_id == job.c.id,
            message.c.kind == messages.TASK,
            message.c.published_at.is_(None),
        )
        .exists()
    )
    return and_(job.c.state.in_([str(State.QUEUED), str(State.RETRYING)]), ~pending)
