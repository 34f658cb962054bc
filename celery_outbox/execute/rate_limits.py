"""What a worker holds back for a rate limit: each job once."""

from __future__ import annotations

import logging
from typing import Any

from celery_outbox.execute.request import OutboxRequest
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.execute")


def hold_once(consumer: Any) -> None:
    """Let a consumer hold one message of a job for a rate limit, and acknowledge other ones.

    Maintenance publishes again what no worker has claimed, and a job that waits for a rate limit
    is not claimed. Without this its copies would wait beside it, until they took up the whole
    prefetch and the worker received nothing of other tasks. After a change of the rate the limit
    is another one, which holds nothing yet: so a copy runs under it, and what stock Celery has
    waiting for the old rate to pass finds its job done.

    Arguments:
        consumer: Celery's, before it has made its handler of deliveries.
    """
    limit = consumer._limit_task

    def limit_once(request: Any, bucket: Any, tokens: int) -> Any:
        if _is_copy(request, bucket):
            log_event(logger, logging.INFO, "outbox.held_already", job=request.id)
            request.acknowledge()
            return None
        return limit(request, bucket, tokens)

    consumer._limit_task = limit_once


def _is_copy(request: Any, bucket: Any) -> bool:
    if not isinstance(request, OutboxRequest) or request.delivery_info.get("redelivered"):
        # A message that was delivered before may be the one that a worker had yet to reject.
        return False
    # A copy of the deque in one step: a timer's thread may take from it meanwhile.
    return any(held.id == request.id for held, _ in tuple(bucket.contents))
