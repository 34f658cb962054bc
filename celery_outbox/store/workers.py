"""Heartbeats: one row per worker process, one update that keeps all its leases."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, delete, select, update

from celery_outbox.core.states import State
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.dialects import insert_if_absent, is_mysql
from celery_outbox.store.schema import Tables


def register(
    connection: Connection, tables: Tables, worker_id: str, *, hostname: str, pid: int
) -> None:
    """Enter a worker process; its id names one start of it, not its host."""
    insert_if_absent(connection, tables.worker, {"id": worker_id, "hostname": hostname, "pid": pid})


def beat(
    connection: Connection,
    tables: Tables,
    worker_id: str,
    job_ids: Collection[str],
    *,
    lease: float,
) -> int:
    """Say that the worker lives, and extend the leases of the jobs that it is running.

    Arguments:
        job_ids: the jobs that the worker process knows to be running: a lease whose job is
            not among them (its pool process died) is left to end.
        lease: seconds from now for which the leases hold.

    Returns:
        How many leases were extended.
    """
    connection.execute(
        update(tables.worker).where(tables.worker.c.id == worker_id).values(seen_at=db_now())
    )
    if not job_ids:
        return 0
    job = tables.job
    # One job that is being ended, by a process that is frozen or a commit that takes long, must not
    # hold the beat up for all the others. Nor does anybody take a job whose row is locked.
    free: Any = (
        select(job.c.id)
        .where(
            job.c.id.in_(sorted(job_ids)),
            job.c.leased_by == worker_id,
            # A lease that ended while the database was away goes on, unless somebody took it: then
            # the job is another's, or runs no more.
            job.c.state == str(State.RUNNING),
        )
        .with_for_update(skip_locked=True)
    )
    if is_mysql(connection.dialect):
        # MySQL does not change a table that the same statement reads.
        free = list(connection.execute(free).scalars())
    statement = update(job).where(job.c.id.in_(free)).values(leased_until=db_after(lease))
    return int(connection.execute(statement).rowcount)


def sign_off(connection: Connection, tables: Tables, worker_id: str) -> None:
    """Remove a worker that ends in good order."""
    connection.execute(delete(tables.worker).where(tables.worker.c.id == worker_id))
