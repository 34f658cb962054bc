"""What the worker's main process sees of a job: it settles what the child process cannot."""

from __future__ import annotations

import logging
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import state as worker_state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.context import reporting
from celery_outbox.core.classification import error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.exceptions import SchemaError
from celery_outbox.execute.callback_id import fix_callback_ids
from celery_outbox.execute.celery_versions import can_stop_bodies, report_failure
from celery_outbox.execute.foreign import Foreign
from celery_outbox.execute.outside import (
    end_lost,
    end_revoked,
    end_unreadable,
    rejected_job,
)
from celery_outbox.execute.payload import Undecodable, decode_call
from celery_outbox.log import log_event
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox.execute")


class OutboxRequest(Request):
    """A request whose lost child and hard time limit end in the database.

    Stock Celery acknowledges such a task for good, or requeues it for ever
    (``task_reject_on_worker_lost``). Here the attempt is settled, counted and followed by another
    one or by quarantine. Both callbacks may fire for one time limit: the lease token makes
    the second a no-op. What differs between Celery's versions and pools is listed in
    :mod:`celery_outbox.execute.celery_versions`.
    """

    def maybe_expire(self) -> bool:
        """Leave it to the guard whether a job's time is over: it says so in the database.

        Celery would also put the id among the revoked ones, and then drop the messages of
        another job that has it.
        """
        return False

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Settle an attempt that ran into its hard time limit."""
        if soft:
            super().on_timeout(soft, timeout)
            return
        log_event(logger, logging.ERROR, "outbox.time_limit", job=self.id, limit=timeout)
        try:
            raise TimeLimitExceeded(timeout)
        except TimeLimitExceeded:
            with reporting(self.id):
                self._end(ExceptionInfo(), Reason.TIME_LIMIT)

    def on_failure(
        self, exc_info: ExceptionInfo, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        """Settle an attempt whose child process died; the rest is Celery's."""
        with reporting(self.id):
            return self._on_failure(exc_info, send_failed_event, return_ok)

    def _on_failure(self, exc_info: ExceptionInfo, send_failed_event: bool, return_ok: bool) -> Any:
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if self._already_revoked or self._already_cancelled:
            # Its process was stopped. The message is acknowledged, or the broker takes it back.
            worker_state.task_ready(self)
            return None
        if isinstance(error, MemoryError) and return_ok:
            worker_state.task_ready(self)
            self.reject(requeue=False)
            self.send_event("task-failed", exception=safe_repr(error), traceback=exc_info.traceback)
            return None
        if return_ok or isinstance(error, (Terminated, Ignore, Reject, Retry)):
            if isinstance(error, Reject) and not error.requeue:
                # First of all: Celery 5.7 asks the result backend before it rejects, and a message
                # whose backend is away would stay with this worker for ever.
                self.reject(requeue=False)
                self._take_call_of_rejected()
            return self._stock_failure(exc_info, send_failed_event, return_ok)
        if isinstance(error, TimeLimitExceeded):
            self._end(exc_info, Reason.TIME_LIMIT)
        elif not isinstance(error, Exception):
            # Result backends cannot store it.
            self._end(_lost(error), Reason.LOST_WORKER)
        elif isinstance(error, WorkerLostError):
            self._end(exc_info, Reason.LOST_WORKER)
        else:
            # Raised around the guard: the message could not be read.
            self._end(exc_info, Reason.UNDECODABLE)
        return None

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """Stop the body of a revoked job, and cancel the job; where the pool cannot stop a body, a
        job that runs goes on, and one that waits is cancelled."""
        stops = can_stop_bodies(pool)
        # First: a body that is stopped in its last attempt would end in quarantine.
        self._cancel_job(running=stops)
        if not stops:
            log_event(logger, logging.WARNING, "outbox.cannot_stop", job=self.id)
            return
        try:
            super().terminate(pool, signal)
        except Exception:
            raise
        except BaseException:
            # gevent kills the greenlet that accepts the job, which is this one.
            self._announce_revoked("terminated", True, signal, False)
            raise

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """Stop the body because the worker ends or lost its broker; where the pool cannot, it
        goes on, and a copy of its message changes nothing."""
        if can_stop_bodies(pool):
            with reporting(self.id):
                super().cancel(pool, *args, **kwargs)
        else:
            log_event(logger, logging.WARNING, "outbox.cannot_stop", job=self.id)

    def _announce_revoked(self, reason: str, *args: Any, **kwargs: Any) -> None:
        """Cancel the job, too, when Celery drops its message because somebody revoked it."""
        self._cancel_job()
        try:
            with reporting(self.id):
                super()._announce_revoked(reason, *args, **kwargs)
        except Exception:  # the result backend may be anything
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=self.id)
            self.acknowledge()
            self._already_revoked = True

    def _cancel_job(self, running: bool = True) -> None:
        try:
            end_revoked(self.task.outbox.guard, self.id, running=running)
        except (SQLAlchemyError, SchemaError):
            log_event(logger, logging.ERROR, "outbox.cancel_failed", exc_info=True, job=self.id)

    def _end(self, exc_info: ExceptionInfo, reason: Reason) -> None:
        if self.acknowledged:
            # The second callback for one time limit.
            return
        worker_state.task_ready(self)
        guard = self.task.outbox.guard
        delivery = guard.delivery_of(self.id, self._request_dict)
        try:
            if reason is Reason.UNDECODABLE:
                foreign = Foreign.of(self._message, delivery.queue)
                job = end_unreadable(guard, self.task, foreign, delivery.attempts_before)
            else:
                job = end_lost(guard, self.task, self.id, reason, delivery.attempts_before)
        except (SQLAlchemyError, SchemaError):
            # Not acknowledged: the attempt may not even have been claimed.
            log_event(logger, logging.ERROR, "outbox.end_failed", exc_info=True, job=self.id)
            self.reject(requeue=True)
            return
        if job is None or job.state is State.QUARANTINED:
            self._fail(job, exc_info)
        elif job.state is State.SUCCEEDED:
            # The child died between settle and ack: callbacks may be missing, and another
            # delivery sends them again. Only once: what died there may die there again.
            if self.delivery_info.get("redelivered"):
                self.acknowledge()
            else:
                self.reject(requeue=True)
        else:
            self.acknowledge()
            self._report_retry(exc_info)

    def _fail(self, job: Job | None, exc_info: ExceptionInfo) -> None:
        if self.acknowledged:
            return
        self.reject(requeue=False)
        self._take_call(job)
        report_failure(self, exc_info)

    def _take_call_of_rejected(self) -> None:
        try:
            self._take_call(rejected_job(self.task.outbox.guard, self.task, self.id))
        except (SQLAlchemyError, SchemaError):
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=self.id)

    def _take_call(self, job: Job | None) -> None:
        """Get arguments, error callbacks and chord from the row: the message carries none."""
        try:
            call = None if job is None else decode_call(self.app, job)
        except Undecodable:
            return
        if call is not None:
            fix_callback_ids(self.id, "link_error", call.embed.get("errbacks"))
            self.__dict__["_payload"] = call
            self._args, self._kwargs = call.args, call.kwargs
            self._request_dict.update(args=call.args, kwargs=call.kwargs)

    def _stock_failure(
        self, exc_info: ExceptionInfo, send_failed_event: bool, return_ok: bool
    ) -> Any:
        try:
            return super().on_failure(exc_info, send_failed_event, return_ok)
        except Exception:
            # The result backend and hooks may be anything; the database has the truth.
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=self.id)
            return None

    def _report_retry(self, exc_info: ExceptionInfo) -> None:
        self.send_event(
            "task-retried", exception=safe_repr(exc_info.exception), traceback=exc_info.traceback
        )
        if not self.store_errors:
            return
        try:
            self.task.backend.mark_as_retry(
                self.id, Retry(), exc_info.traceback, request=self._context
            )
        except Exception:  # the result backend may be anything; the database has the truth
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=self.id)


def _lost(error: BaseException) -> ExceptionInfo:
    try:
        raise WorkerLostError(f"the body left its process: {error_code(error)}")
    except WorkerLostError:
        return ExceptionInfo()
