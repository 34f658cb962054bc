"""Ends attempts from outside: what the worker's main process writes for a pool process that
cannot, and for messages that never reach one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from celery import Task
from sqlalchemy import Connection

from celery_outbox.core.classification import Verdict
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryIn, after_failure
from celery_outbox.core.states import WAITING_STATES, State
from celery_outbox.execute import adoption
from celery_outbox.execute.delivery import Delivery
from celery_outbox.execute.fence import Fence
from celery_outbox.store import job as jobs
from celery_outbox.store import transitions
from celery_outbox.store.job import Job

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard


def end_lost(
    guard: Guard, task: Task, job_id: str, reason: Reason, attempts_before: int
) -> Job | None:
    """End an attempt of this worker whose process is gone.

    A process that died before it had claimed the job counts as an attempt too: a task that
    kills its process that early must come to an end like any other.

    Arguments:
        attempts_before: attempts that the job had when its message was published; with more
            now, the process has claimed the job, and what the row says is its end.

    Returns:
        The job afterwards, whoever ended the attempt; ``None``: there is no such job.
    """

    def write(connection: Connection) -> Job | None:
        job = jobs.lock(connection, guard.tables, job_id)
        if job is None or job.task != task.name:
            return job
        if job.state in WAITING_STATES and job.attempt <= attempts_before:
            transitions.claim(
                connection, guard.tables, job, actor=guard.worker_id(), lease=guard.config.lease
            )
            job = jobs.get(connection, guard.tables, job_id)
        if job is not None and job.leased_by == guard.worker_id():
            _follow(connection, guard, task, job, reason)
            job = jobs.get(connection, guard.tables, job_id)
        return job

    return guard.database.write(write)


def end_waiting(guard: Guard, job_id: str, queue: str | None, reason: Reason) -> Job | None:
    """Quarantine a waiting job whose message no worker can run.

    Arguments:
        queue: where the message came from, as far as its routing tells.

    Returns:
        The job afterwards; ``None``: there is no such job.
    """

    def write(connection: Connection) -> Job | None:
        job = jobs.lock(connection, guard.tables, job_id)
        if job is None:
            return None
        transitions.quarantine_waiting(
            connection,
            guard.tables,
            job_id,
            attempt=job.attempt,
            actor=guard.worker_id(),
            reason=reason,
            error_code=str(reason),
            copy=not guard.broker_dead_letters(job.queue or queue),
        )
        return jobs.get(connection, guard.tables, job_id)

    return guard.database.write(write)


def end_unreadable(guard: Guard, task: Task, delivery: Delivery) -> Job | None:
    """Quarantine the job of a message whose body no worker can read; a message that has no job
    gets one, without its arguments. A job that was claimed since has had its attempt: the message
    was read, and its process is lost.

    Returns:
        The job afterwards.
    """
    known = guard.database.read(
        lambda connection: jobs.get(connection, guard.tables, delivery.job_id)
    )
    if known is not None and known.attempt > delivery.attempts_before:
        return end_lost(guard, task, delivery.job_id, Reason.LOST_WORKER, delivery.attempts_before)
    job = end_waiting(guard, delivery.job_id, delivery.queue, Reason.UNDECODABLE)
    if job is not None:
        return job
    return guard.database.write(
        lambda connection: adoption.quarantine(
            connection, guard, task, delivery, Reason.UNDECODABLE
        )
    )


def end_revoked(guard: Guard, job_id: str, *, running: bool = True) -> None:
    """Cancel a job that was revoked through Celery: before it ran, or with its process.

    Arguments:
        running: also one that runs; its body is stopped.
    """

    def write(connection: Connection) -> None:
        job = jobs.lock(connection, guard.tables, job_id)
        if job is None:
            return
        if running and job.state is State.RUNNING and job.leased_by == guard.worker_id():
            fence = Fence(guard.tables, job_id, job.lease_token, job.attempt, guard.worker_id())
            fence.retry("revoked", None, 0.0)(connection)
        transitions.cancel(connection, guard.tables, job, actor=guard.worker_id())

    guard.database.write(write)


def _follow(connection: Connection, guard: Guard, task: Task, job: Job, reason: Reason) -> None:
    step = after_failure(
        Verdict(False, str(reason), reason=reason),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        policy=guard.policy_of(task),
        random=random.random(),
    )
    fence = Fence(guard.tables, job.id, job.lease_token, job.attempt, guard.worker_id())
    if isinstance(step, RetryIn):
        fence.retry(str(reason), None, step.delay)(connection)
    else:
        copy = not guard.broker_dead_letters(job.queue)
        fence.quarantine(step.reason, str(reason), None, copy)(connection)
