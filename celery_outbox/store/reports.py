"""Ends of jobs that Celery's side is still to be told of, because no worker may ever meet them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, select, update

from celery_outbox.store.clock import db_now
from celery_outbox.store.job import Job
from celery_outbox.store.schema import Tables


def due(connection: Connection, tables: Tables, limit: int) -> list[str]:
    """The ids of jobs whose end is to be told now, those that wait longest first."""
    job = tables.job
    statement = (
        select(job.c.id).where(job.c.report_at <= db_now()).order_by(job.c.report_at).limit(limit)
    )
    return list(connection.execute(statement).scalars())


def mark(connection: Connection, tables: Tables, job: Job, at: datetime | None) -> bool:
    """Say when the end of a job is to be told next; ``None``: never again.

    Returns:
        Whether it took effect; ``False``: a person sent the job on its way again, or somebody else
        tells of it.
    """
    column = tables.job.c
    statement = (
        update(tables.job)
        .where(column.id == job.id, column.report_at == job.report_at)
        .values(report_at=at)
    )
    return bool(connection.execute(statement).rowcount == 1)
