"""Tasks that go past the outbox although their app has swapped its base class."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.execute")


def warn_of_tasks_past_the_outbox(app: Any) -> None:
    """Log one warning with the names of the tasks whose base class is derived from Celery's: an
    app that has swapped ``task_cls`` has as a rule forgotten these. ``base=celery.Task`` in the
    decorator says that it is meant."""
    if not hasattr(app.Task, "outbox"):
        # Single tasks are swapped, so the others are not forgotten.
        return
    names = sorted(name for name, task in app.tasks.items() if _is_forgotten(type(task)))
    if names:
        log_event(
            logger,
            logging.WARNING,
            "outbox.tasks_past_the_outbox",
            tasks=",".join(names),
            problem="their base class is derived from celery.Task, so they are not recorded",
            remedy="derive it from celery_outbox.OutboxTask, or say base=celery.Task",
        )


def _is_forgotten(cls: type[Task]) -> bool:
    if hasattr(cls, "outbox"):
        return False
    # A decorated function's class has nothing of its own but the function.
    base = cls.__bases__[0] if hasattr(cls, "__wrapped__") else cls
    return base.__module__.partition(".")[0] not in ("celery", "celery_outbox")
