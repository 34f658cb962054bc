"""What becomes of a delivery when an error gets past Celery's tracer and the process lives on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.task import Context
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore, Reject, Retry

from celery_outbox.core.classification import error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.exceptions import JobQuarantined
from celery_outbox.execute.traced import SIGNALS, ended_by
from celery_outbox.log import log_event
from celery_outbox.store.patience import LONGEST_PAUSE, pause

if TYPE_CHECKING:
    from celery_outbox.execute.attempt import Attempt

logger = logging.getLogger("celery_outbox.execute")


def unreported(attempt: Attempt, error: Exception, request: dict[str, Any]) -> trace_ok_t:
    """End a delivery whose tracer failed by itself: Celery's result backend is away, as a rule.

    What the database says of the job stands.
    """
    log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=attempt.job_id)
    if not attempt.settled:
        ends_with = attempt.fail_outside_body(error)
        if isinstance(ends_with, SIGNALS):
            return ended_by(ends_with)
    if attempt.unwritten:
        return ended_by(Reject(error_code(error), requeue=True))
    if attempt.has_succeeded and not is_redelivered(request):
        # The next delivery finds the result, and reports it.
        pause(LONGEST_PAUSE)
        return ended_by(Reject("the result could not be reported", requeue=True))
    if attempt.has_failed and not attempt.keep_from_broker:
        return ended_by(Reject(error_code(error), requeue=False))
    return ended_by(Ignore("the database has the job's state"))


def is_redelivered(request: dict[str, Any]) -> bool:
    """Whether the broker delivered this message before."""
    return bool((request.get("delivery_info") or {}).get("redelivered"))


def caught(attempt: Attempt, error: BaseException, request: dict[str, Any]) -> trace_ok_t:
    """End a delivery whose body, hooks or callbacks raised what is no ``Exception``:
    ``sys.exit()``, a killed greenlet, a cancelled coroutine.

    Returns:
        What Celery acknowledges, rejects or reports as a retry.
    """
    code = error_code(error)
    log_event(logger, logging.WARNING, "outbox.escaped", job=attempt.job_id, error=code)
    if not attempt.settled:
        attempt.leave(error)
    if attempt.has_succeeded:
        return _after_success(error, request)
    if attempt.stale:
        return ended_by(Ignore("the lease was lost"))
    if attempt.ended is State.RETRYING:
        return ended_by(Retry(code))
    if attempt.ended is None and attempt.outcome is None:
        # Nobody knows whether the end is written: the next delivery looks.
        return ended_by(Reject(code, requeue=True))
    return _failure(attempt, code, request)


def _after_success(error: BaseException, request: dict[str, Any]) -> trace_ok_t:
    # As in the main process: callbacks may be missing, and what ended here may end there again.
    if is_redelivered(request):
        return ended_by(Ignore("it has succeeded, and this is its second delivery"))
    return ended_by(Reject(error_code(error), requeue=True))


def _failure(attempt: Attempt, code: str, request: dict[str, Any]) -> trace_ok_t:
    if not attempt.left:
        # Celery has reported the failure, and a hook of that raised this.
        return _failed(code)
    try:
        raise JobQuarantined(attempt.job_id, str(Reason.LOST_WORKER), code)
    except JobQuarantined as error:
        info = TraceInfo(states.FAILURE, error)
        try:
            context = Context(request, called_directly=False)
            return trace_ok_t(info.handle_error_state(attempt.task, context), info, 0.0, None)
        except Exception:  # the result backend and hooks may be anything, and the job has ended
            log_event(
                logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=attempt.job_id
            )
            return _failed(code)


def _failed(code: str) -> trace_ok_t:
    try:
        # Not the error itself: it may be none that can be sent to another process.
        raise RuntimeError(code)
    except RuntimeError as error:
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(states.FAILURE, error), 0.0, None)
