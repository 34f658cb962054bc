"""What a task's request says of its job: the row, in place of the message."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery import Celery

from celery_outbox.execute.attempt import Attempt
from celery_outbox.execute.callback_id import fix_callback_ids
from celery_outbox.execute.delivery import VERSION_HEADER
from celery_outbox.execute.payload import Call, Undecodable, decode_call

#: A job that is due so much later than it was recorded was called for a later time.
_DELAYED = timedelta(milliseconds=100)


def hydrate(app: Celery, attempt: Attempt, request: dict[str, Any]) -> Call:
    """Put what the job's row says into the request that Celery's tracer works with.

    Returns:
        The job's call. Where it cannot be read, it is empty, and the attempt ends with the error.
    """
    job = attempt.job
    call, headers = Call([], {}, {}), {}
    try:
        headers = job.envelope.headers
        call = decode_call(app, job)
    except (Undecodable, ValueError, TypeError) as error:
        if attempt.outcome is None:
            attempt.outcome = attempt.refusal(error)
    for name, value in headers.items():
        if name not in ("id", "task"):
            request[name] = value
    if job.available_at - job.recorded_at > _DELAYED:
        # The message has none, since the delay was the database's.
        request["eta"] = job.available_at.isoformat()
    request.update(call.embed)
    # A body finds in self.request.headers what the call gave, and gives it to its retries.
    request.pop(VERSION_HEADER, None)
    fix_callback_ids(job.id, "link", request.get("callbacks"))
    fix_callback_ids(job.id, "link_error", request.get("errbacks"))
    # Celery counts retries, this package counts attempts.
    request["retries"] = attempt.retries
    request["args"], request["kwargs"] = call.args, call.kwargs
    return call
