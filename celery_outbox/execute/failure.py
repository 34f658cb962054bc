"""What an error of a body means: the verdict, the text that is kept, the delay it asks for."""

from __future__ import annotations

import inspect
import logging
import traceback
from datetime import datetime, timezone
from functools import partial

from celery import Task
from celery.exceptions import Retry
from kombu.exceptions import EncodeError

from celery_outbox.core.classification import ClassifyHook, Verdict, classify, error_code
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.execute")

#: The longest text that is kept of an error, in characters.
MAX_DETAIL = 10_000


def verdict_on(task: Task, job_id: str, error: BaseException, now: datetime) -> Verdict:
    """Whether another attempt may help, as the task says or else the defaults.

    Arguments:
        now: the database's clock.
    """
    if isinstance(error, EncodeError):
        # The result cannot be stored; another run would return the like.
        return Verdict(True, error_code(error))
    by_task = partial(
        classify,
        error,
        now=now,
        permanent_for=tuple(getattr(task, "permanent_for", ())),
        retry_for=tuple(getattr(task, "retry_for", ())),
    )
    try:
        return by_task(hook=_classify_hook(task))
    except Exception:
        # The hook is wrong; the attempt must end all the same.
        log_event(logger, logging.ERROR, "outbox.classify_failed", exc_info=True, job=job_id)
        return by_task()


def detail_of(error: BaseException | None, wanted: str) -> str | None:
    """The text of an error, as far as ``outbox_error_detail`` wants it."""
    if error is None or wanted == "none":
        return None
    if wanted == "message":
        lines = traceback.format_exception_only(type(error), error)
    else:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(lines).replace("\x00", "\\x00")[:MAX_DETAIL]


def delay_of(signal: Retry, now: datetime) -> float | None:
    """Seconds from ``now`` after which a Retry that was raised by hand wants to be back."""
    if isinstance(signal.when, datetime):
        when = signal.when if signal.when.tzinfo else signal.when.replace(tzinfo=timezone.utc)
        return max((when - now).total_seconds(), 0.0)
    return None if signal.when is None else float(signal.when)


def _classify_hook(task: Task) -> ClassifyHook | None:
    """The task's ``classify``, which may take the error alone or the task before it."""
    hook = inspect.getattr_static(task, "classify", None)
    if inspect.isfunction(hook) and len(inspect.signature(hook).parameters) == 1:
        return hook
    bound: ClassifyHook | None = getattr(task, "classify", None)
    return bound
