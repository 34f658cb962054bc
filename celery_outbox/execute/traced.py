"""What a tracer returns for a delivery whose body did not run, or does not count."""

from __future__ import annotations

from billiard.einfo import ExceptionInfo
from celery import states
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore, Reject, Retry

_STATES = {Ignore: states.IGNORED, Reject: states.REJECTED, Retry: states.RETRY}


#: What a body or the guard raises to tell Celery how a delivery ends.
SIGNALS = tuple(_STATES)


def ended_by(signal: Ignore | Reject | Retry) -> trace_ok_t:
    """The outcome of a delivery that ended by one of Celery's signals: the worker's main process
    acknowledges it, rejects it, or reports a retry."""
    try:
        raise signal
    except SIGNALS:
        info = TraceInfo(_STATES[type(signal)], signal)
        return trace_ok_t(ExceptionInfo(internal=True), info, 0.0, None)
