"""Messages that reach a worker without a job: adopted when they can run, quarantined if not."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import Task
from kombu.exceptions import EncodeError
from sqlalchemy import Connection

from celery_outbox.core.classification import error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.core.result_key import fill_result_key
from celery_outbox.core.states import State
from celery_outbox.exceptions import InvalidResultKey
from celery_outbox.execute.delivery import Delivery
from celery_outbox.execute.foreign import Foreign
from celery_outbox.execute.outside import end_waiting, set_aside
from celery_outbox.execute.payload import Call, encode_call, envelope_of
from celery_outbox.log import log_event
from celery_outbox.store import job as jobs
from celery_outbox.store import recording, relaying
from celery_outbox.store.job import Job
from celery_outbox.store.recording import NewJob

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard

logger = logging.getLogger("celery_outbox.execute")


def adopt(connection: Connection, guard: Guard, task: Task, delivery: Delivery, call: Call) -> None:
    """Record the job of a plain Celery message, unless there is one with its id.

    Raises:
        kombu.exceptions.EncodeError: the arguments cannot be stored.
        InvalidResultKey: the arguments give no usable result key.
    """
    if jobs.exists(connection, guard.tables, delivery.job_id):
        return
    serializer = task.serializer or guard.app.conf.task_serializer
    body, content_type, encoding = encode_call(guard.app, call, serializer)
    # A client without the outbox counts its retries in the message.
    retries = delivery.attempts_before
    template = getattr(task, "result_key", None)
    new = NewJob(
        id=delivery.job_id,
        task=task.name,
        queue=delivery.queue,
        envelope=envelope_of(delivery.request, delivery.queue, content_type, encoding),
        body=body,
        max_attempts=max(guard.policy_of(task).max_attempts, retries + 1),
        attempt=retries,
        expires_at=delivery.expires_at,
        result_key=fill_result_key(task.name, template, delivery.job_id, call.args, call.kwargs),
    )
    recording.adopt(connection, guard.tables, new, actor=guard.worker_id())


def take_over(connection: Connection, guard: Guard, task: Task, job: Job, call: Call) -> Job:
    """Make a job ours that was recorded for another service, because its message came here.

    Returns:
        The job afterwards, still locked; in quarantine where its arguments give no result key.
    """
    template = getattr(task, "result_key", None)
    facts: dict[str, Any]
    try:
        key = fill_result_key(task.name, template, job.id, call.args, call.kwargs)
    except InvalidResultKey as error:
        code = error_code(error)
        # Its worker will find that the job has its end already.
        end_waiting(
            connection, guard, job, Reason.UNDECODABLE, code, acknowledged=True, report=False
        )
    else:
        allowed = job.attempts_before + guard.policy_of(task).max_attempts
        facts = {"max_attempts": max(allowed, job.attempt + 1), "result_key": key}
        if job.state is State.RELAYED:
            actor = guard.worker_id()
            relaying.adopt_relayed(connection, guard.tables, job, actor=actor, **facts)
        else:
            relaying.keep_from_relaying(connection, guard.tables, job, **facts)
    return jobs.lock(connection, guard.tables, job.id) or job


def quarantine(
    connection: Connection,
    guard: Guard,
    task: Task,
    delivery: Delivery,
    call: Call,
    reason: Reason,
) -> Job:
    """Record a message that cannot become a job as a quarantined one."""
    foreign = foreign_of(guard, task, delivery, call)
    set_aside(connection, guard, foreign, delivery.job_id, reason, str(reason))
    job = jobs.get(connection, guard.tables, delivery.job_id)
    if job is None:
        raise AssertionError("a job that was just recorded is not there")
    return job


def foreign_of(guard: Guard, task: Task, delivery: Delivery, call: Call) -> Foreign:
    """What is known, in a pool process, of a message that is no job of ours."""
    body, content_type, encoding = None, "", ""
    if not delivery.is_claim_check:
        serializer = task.serializer or guard.app.conf.task_serializer
        try:
            body, content_type, encoding = encode_call(guard.app, call, serializer)
        except EncodeError:
            # Whatever the worker could read and nobody can write again.
            log_event(logger, logging.ERROR, "outbox.arguments_lost", job=delivery.job_id)
    envelope = envelope_of(delivery.request, delivery.queue, content_type, encoding)
    return Foreign.kept(
        envelope, body, {**delivery.request, "task": task.name}, delivery.redelivered
    )
