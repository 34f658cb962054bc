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
from celery_outbox.exceptions import LostRace
from celery_outbox.execute.fence import Fence
from celery_outbox.execute.foreign import Foreign, own_id
from celery_outbox.store import job as jobs
from celery_outbox.store import messages, quarantining, recording, transitions
from celery_outbox.store.job import Job
from celery_outbox.store.recording import NewJob

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard


def end_lost(
    guard: Guard, task: Task, job_id: str, reason: Reason, attempts_before: int
) -> Job | None:
    """End an attempt of this worker whose process is gone.

    A process that died before it had claimed the job counts as an attempt too: a task that
    kills its process that early must come to an end like any other.

    Arguments:
        attempts_before: attempts that the job had when its message was published. With one more
            now, the process has claimed the job; with more than that, another attempt may have
            it, in this worker too, and what the row says stands.

    Returns:
        The job afterwards, whoever ended the attempt; ``None``: there is no such job.
    """

    def write(connection: Connection) -> Job | None:
        job = jobs.lock(connection, guard.tables, job_id)
        if job is None or job.task != task.name:
            return job
        lost = job.attempt == attempts_before + 1
        if job.state in WAITING_STATES and job.attempt <= attempts_before:
            lost = bool(
                transitions.claim(
                    connection, guard.tables, job, actor=guard.worker_id(), lease=guard.config.lease
                )
            )
            job = jobs.get(connection, guard.tables, job_id)
        if lost and job is not None and job.leased_by == guard.worker_id():
            _follow(connection, guard, task, job, reason)
            job = jobs.get(connection, guard.tables, job_id)
        return job

    return guard.database.write(write)


def end_foreign(guard: Guard, foreign: Foreign, reason: Reason, code: str) -> tuple[str, bool]:
    """Record a message that no worker can run as a quarantined job.

    It becomes the job whose id it names; where there is one, that is left alone, and the message
    becomes a job of its own. Only when it is the message of a job that waits for it, that job is
    quarantined. Safe to repeat: a message that is delivered again changes nothing.

    Arguments:
        code: what exactly is wrong with it.

    Returns:
        The id under which it is recorded, and whether the message belongs in the quarantine
        queue; ``False``: it is a mere duplicate, to be acknowledged.
    """
    return guard.database.write(
        lambda connection: _end_foreign(connection, guard, foreign, reason, code)
    )


def _end_foreign(
    connection: Connection, guard: Guard, foreign: Foreign, reason: Reason, code: str
) -> tuple[str, bool]:
    if foreign.job_id is None:
        set_aside(connection, guard, foreign, foreign.own_id, reason, code)
        return foreign.own_id, True
    job = jobs.lock(connection, guard.tables, foreign.job_id)
    if job is None:
        if set_aside(connection, guard, foreign, foreign.job_id, reason, code):
            return foreign.job_id, True
        # Somebody was faster.
        job = jobs.lock(connection, guard.tables, foreign.job_id)
    if job is None:
        raise LostRace(job_id=foreign.job_id)
    if _is_own(job, foreign):
        if job.state in WAITING_STATES:
            transitions.add_delivery(connection, guard.tables, job.id)
            end_waiting(connection, guard, job, reason, code)
            return job.id, True
        if reason is Reason.UNKNOWN_TASK:
            # A copy of a message: what counts is in the job's row.
            transitions.count_delivery(
                connection, guard.tables, job, event="duplicate", actor=guard.worker_id()
            )
            return job.id, _was_not_rejected(connection, guard, foreign, job)
    if _was_relayed(job, foreign):
        transitions.add_delivery(connection, guard.tables, job.id)
        end_waiting(connection, guard, job, reason, code)
        return job.id, True
    if _was_made_by(job, foreign):
        # This message made the job, and the worker died before it could reject it.
        transitions.count_delivery(
            connection, guard.tables, job, event="duplicate", actor=guard.worker_id()
        )
        return job.id, True
    return note_foreign(connection, guard, foreign, job, reason, code), True


def note_foreign(
    connection: Connection, guard: Guard, foreign: Foreign, job: Job, reason: Reason, code: str
) -> str:
    """Set a message aside that has another job's id, and say so in that job's journal.

    Returns:
        The id under which the message is recorded.
    """
    if set_aside(connection, guard, foreign, foreign.own_id, reason, code):
        transitions.count_delivery(
            connection, guard.tables, job, event="mismatch", actor=guard.worker_id()
        )
    return foreign.own_id


def set_aside(
    connection: Connection, guard: Guard, foreign: Foreign, job_id: str, reason: Reason, code: str
) -> bool:
    """Record a message as a quarantined job of its own, with everything that it carries.

    Returns:
        Whether it was recorded; ``False``: it is there, and was only delivered again.
    """
    task = guard.app.tasks.get(foreign.task)
    policy = guard.config.retry_policy if task is None else guard.policy_of(task)
    new = NewJob(
        id=job_id,
        task=foreign.task,
        queue=foreign.queue,
        envelope=foreign.envelope,
        body=foreign.body,
        max_attempts=policy.max_attempts,
        # A task without the outbox gets the whole message again.
        relay=task is not None and not hasattr(type(task), "outbox"),
    )
    return recording.record_quarantined(
        connection,
        guard.tables,
        new,
        reason=reason,
        actor=guard.worker_id(),
        copy=not guard.broker_dead_letters(foreign.queue),
        error_code=code,
    )


def end_waiting(
    connection: Connection,
    guard: Guard,
    job: Job,
    reason: Reason,
    code: str,
    *,
    acknowledged: bool = False,
    report: bool = True,
) -> None:
    """Quarantine a locked job whose message no worker can run, if it waits.

    Arguments:
        code: what exactly is wrong with the message.
        acknowledged: the message will be, so that the broker does not dead-letter it.
        report: the maintenance is to tell Celery's side; ``False``: the caller does.
    """
    quarantining.quarantine_waiting(
        connection,
        guard.tables,
        job.id,
        attempt=job.attempt,
        actor=guard.worker_id(),
        reason=reason,
        error_code=code,
        copy=acknowledged or not guard.broker_dead_letters(job.queue),
        report=report,
        relayed=job.relay,
    )


def end_unreadable(guard: Guard, task: Task, foreign: Foreign, attempts_before: int) -> Job | None:
    """Quarantine the job of a message that a pool process could not read.

    A job that was claimed since has had its attempt: the message was read, and what came after
    could not be, so that attempt is lost.

    Arguments:
        attempts_before: attempts that the job had when its message was published.

    Returns:
        The job afterwards, whatever its state.
    """
    code = str(Reason.UNDECODABLE)

    def write(connection: Connection) -> Job | None:
        job_id = foreign.job_id or foreign.own_id
        job = jobs.lock(connection, guard.tables, job_id)
        if job is None:
            set_aside(connection, guard, foreign, job_id, Reason.UNDECODABLE, code)
        elif _is_own(job, foreign) and job.attempt > attempts_before:
            if job.leased_by == guard.worker_id():
                _follow(connection, guard, task, job, Reason.LOST_WORKER)
        elif job.state in WAITING_STATES and not _is_own(job, foreign):
            job_id = note_foreign(connection, guard, foreign, job, Reason.UNDECODABLE, code)
        else:
            end_waiting(connection, guard, job, Reason.UNDECODABLE, code, report=False)
        return jobs.get(connection, guard.tables, job_id)

    return guard.database.write(write)


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


def rejected_job(guard: Guard, task: Task, job_id: str) -> Job | None:
    """The job whose body has just refused it for good; ``None``: it is another one."""
    job = guard.database.read(lambda connection: jobs.get(connection, guard.tables, job_id))
    refused = job is not None and job.state is State.QUARANTINED and job.task == task.name
    return job if refused and job is not None and job.reason == str(Reason.REJECTED) else None


def _follow(connection: Connection, guard: Guard, task: Task, job: Job, reason: Reason) -> None:
    step = after_failure(
        Verdict(False, str(reason), reason=reason),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        attempts_before=job.attempts_before,
        policy=guard.policy_of(task),
        random=random.random(),
    )
    fence = Fence(guard.tables, job.id, job.lease_token, job.attempt, guard.worker_id())
    if isinstance(step, RetryIn):
        fence.retry(str(reason), None, step.delay)(connection)
    else:
        copy = not guard.broker_dead_letters(job.queue)
        fence.quarantine(step.reason, str(reason), None, copy)(connection)


def _was_not_rejected(connection: Connection, guard: Guard, foreign: Foreign, job: Job) -> bool:
    """Whether a message of a quarantined job is the one that was never rejected."""
    if job.state is not State.QUARANTINED or job.finished_at is None:
        return False
    copied = messages.has_copy(connection, guard.tables, job.id, job.finished_at)
    return foreign.redelivered and not copied


def _is_own(job: Job, foreign: Foreign) -> bool:
    """Whether a message came through the outbox for this very job."""
    return foreign.is_claim_check and job.task == foreign.task


def _was_relayed(job: Job, foreign: Foreign) -> bool:
    """Whether a message went out in full for this job, as for a task of another service, and came
    to a worker of ours."""
    open_states = WAITING_STATES | {State.RELAYED}
    return job.relay and job.state in open_states and job.task == foreign.task


def _was_made_by(job: Job, foreign: Foreign) -> bool:
    """Whether a job was recorded from this very message."""
    try:
        return own_id(job.envelope, job.body) == foreign.own_id
    except (ValueError, TypeError, KeyError, AttributeError):
        # A row that cannot be read.
        return False
