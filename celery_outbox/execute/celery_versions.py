"""Where Celery 5.4 to 5.7, and its pools, differ for a worker that runs jobs.

What this package does is the same in all of them; what that takes is said here, and the little
code that has to ask is here, too. (Which queues Celery can consume, ``celery_outbox.queues`` asks.)

Acknowledging a failure
    5.4 reads ``acks_on_failure_or_timeout``. 5.7 reads ``acks_on_failure`` and ``acks_on_timeout``,
    and has ``retry_on_worker_lost`` beside ``reject_on_worker_lost``: :data:`FIXED_OPTIONS`.
A hard time limit
    5.4 stores a failure and leaves the message alone. 5.7 calls the failure hooks, acknowledges or
    requeues, and stands back during a cold shutdown. ``OutboxRequest.on_timeout`` replaces both.
``MemoryError``
    Both raise it again in the main process when an attempt has failed with it: the worker ends,
    its message unacknowledged. ``OutboxRequest.on_failure`` rejects the message instead.
A process that is gone
    Billiard 4.3 reports the ``SystemExit`` of a body before the process is gone, and nothing for
    one that was told to end (:func:`was_told_to_end`); 4.2 reports ``WorkerLostError`` alone.
    5.7 makes a ``WorkerLostError`` of it, 5.4 fails to store it: ``OutboxRequest`` does as 5.7.
A failure that the main process found
    With these options 5.5 and 5.6 requeue a message whose job met its hard time limit and report
    nothing, and 5.6 reports no failure during a cold shutdown; all raise ``MemoryError`` again.
    The job has ended in the database by then, so :func:`report_failure` takes their place.
Errors that are no ``Exception``
    Prefork sends ``asyncio.CancelledError`` and the like to the main process as a failure. The
    other pools call the wrong callback with them, which leaves the message unacknowledged for
    good, and gevent takes ``GreenletExit`` for a success. The guard lets none of them out
    (:func:`must_leave`).
``Reject`` and ``MemoryError`` out of hooks
    5.7 lets both out of its tracer, 5.4 the second; all pools but prefork then lose the message.
Errors of a call with ``ignore_result``
    5.7 stores none. 5.4 asks the task alone, and stores them.
Stopping a body
    Prefork can, and gevent in 5.7; threads and solo cannot and raise (:func:`can_stop_bodies`).
    Only prefork knows soft time limits; prefork and gevent know hard ones, threads and solo none.
Cold shutdown
    5.4 ends the pool. 5.7 cancels the requests first, in the signal handler, after a pause of
    ``worker_soft_shutdown_timeout`` seconds, and has ``emit_retry`` in ``Request.cancel``.
Connection loss with ``worker_cancel_long_running_tasks_on_connection_loss``
    The worker of 5.4 ends when a request cannot be cancelled, 5.7 logs it. Neither happens:
    ``OutboxRequest.cancel`` does not raise.
Acknowledgements at the end of a warm shutdown
    5.7 sends those of the jobs that the pool finished last (prefork); 5.4 does not, and the copy
    that the broker delivers again is absorbed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import billiard.common
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.process import current_process
from celery import signals
from celery.concurrency.base import BasePool
from celery.exceptions import WorkerShutdown, WorkerTerminate
from celery.utils.serialization import get_pickled_exception
from kombu.utils.encoding import safe_repr

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.execute")
_celery_logger = logging.getLogger("celery.worker.request")

#: How messages are acknowledged. Not a user's choice: after the result is stored; a final failure
#: by rejecting, so that RabbitMQ dead-letters it; a lost attempt comes back from the database.
FIXED_OPTIONS: Mapping[str, bool] = {
    "acks_late": True,
    "acks_on_failure_or_timeout": False,
    "acks_on_failure": False,
    "acks_on_timeout": True,
    "reject_on_worker_lost": False,
    "retry_on_worker_lost": False,
}

#: Error code of an attempt whose process was told to end: cold shutdown, or a lost connection.
WORKER_STOPPED = "worker_stopped"


def in_pool_process() -> bool:
    """Whether this is a process of the prefork pool, which can leave without its worker."""
    return str(current_process().name) != "MainProcess"


def was_told_to_end() -> bool:
    """Whether this pool process got its signal to end, so that ``SystemExit`` is not the body's."""
    fired = getattr(billiard.common, "terminate_handler_fired", None)
    return in_pool_process() and fired is not None and bool(fired())


def must_leave(error: BaseException) -> bool:
    """Whether an error must reach the pool, because the process or the worker ends by it.

    Any other that reaches a pool costs it more than the job it came from.
    """
    if isinstance(error, (WorkerShutdown, WorkerTerminate)):
        return True
    if isinstance(error, Exception) or not in_pool_process():
        return False
    return isinstance(error, (SystemExit, KeyboardInterrupt)) or was_told_to_end()


def ends_worker(error: BaseException) -> bool:
    """Whether an attempt ended because its worker was told to end."""
    return isinstance(error, (WorkerShutdown, WorkerTerminate)) or was_told_to_end()


def is_green_timeout(error: BaseException) -> bool:
    """Whether the error is how gevent and eventlet tell a body its hard time limit."""
    kinds = [kind for kind in type(error).__mro__ if kind.__name__ == "Timeout"]
    return any(kind.__module__.split(".")[0] in ("gevent", "eventlet") for kind in kinds)


def can_stop_bodies(pool: Any) -> bool:
    """Whether the pool can end a body that runs."""
    # Of the pool itself: prefork gets the function from the pool that it wraps.
    function = getattr(pool.terminate_job, "__func__", pool.terminate_job)
    return function is not BasePool.terminate_job


def report_failure(request: Any, exc_info: ExceptionInfo) -> None:
    """Say for a process that is gone what Celery says of a task that failed: to the result backend
    with callbacks and chord, to receivers of ``task_failure``, as an event, and in the log.

    Arguments:
        request: a request of Celery's whose message is acknowledged or rejected already.
    """
    task = request.task
    error = exc_info.exception
    if isinstance(error, ExceptionWithTraceback):
        error = error.exc
    # As the newest Celery does: a receiver finds the request in task.request.
    task.request_stack.push(request._context)
    try:
        try:
            task.backend.mark_as_failure(
                request.id, error, request=request._context, store_result=request.store_errors
            )
        except Exception:  # the result backend may be anything; the database has the truth
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=request.id)
        signals.task_failure.send(
            sender=task,
            task_id=request.id,
            exception=error,
            args=request.args,
            kwargs=request.kwargs,
            traceback=exc_info.traceback,
            einfo=exc_info,
        )
    finally:
        task.request_stack.pop()
    request.send_event(
        "task-failed",
        exception=safe_repr(get_pickled_exception(exc_info.exception)),
        traceback=exc_info.traceback,
    )
    _celery_logger.error("Task handler raised error: %r", error, exc_info=exc_info.exc_info)
