"""What an app gets by using :class:`~celery_outbox.OutboxTask`, when Celery finalizes it:
tasks for beat, and steps in its workers."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import Any

import celery
from celery import Celery
from celery._state import connect_on_app_finalize

from celery_outbox.app import Outbox
from celery_outbox.config import Config
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox")

DISPATCH_TASK = "celery_outbox.dispatch"
MAINTAIN_TASK = "celery_outbox.maintain"

#: Seconds between two dispatch runs by beat, and the longest time one of them takes.
BEAT_INTERVAL = 1.0


def beat_schedule(config: Config) -> dict[str, dict[str, Any]]:
    """Entries for ``beat_schedule`` that dispatch and maintain where no daemon is wanted.

    A run that was not picked up before the next one is due expires, so that they do not pile up.
    """
    return {
        "outbox-dispatch": {
            "task": DISPATCH_TASK,
            "schedule": BEAT_INTERVAL,
            "options": {"expires": BEAT_INTERVAL, "ignore_result": True},
        },
        "outbox-maintain": {
            "task": MAINTAIN_TASK,
            "schedule": config.maintenance_interval,
            "options": {"expires": config.maintenance_interval, "ignore_result": True},
        },
    }


class InternalTask(celery.Task):
    """A task that runs the outbox and so cannot go through it."""

    abstract = True

    def apply_async(self, *args: Any, expires: float | None = None, **options: Any) -> Any:
        """Send it as Celery does, but let the worker expire it and not the broker, which
        would dead-letter it to the quarantine queue.

        Arguments:
            expires: seconds after which a worker drops it.
        """
        if expires is not None:
            until = datetime.now(timezone.utc) + timedelta(seconds=expires)
            options["headers"] = {**(options.get("headers") or {}), "expires": until.isoformat()}
        return super().apply_async(*args, **options)


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def _set_up(app: Celery) -> None:
    """Register the tasks for beat with an app that uses the outbox throughout."""
    if hasattr(app.Task, "outbox"):
        register_tasks(app)


def register_tasks(app: Celery) -> None:
    """Register the tasks for beat; safe to repeat."""
    if DISPATCH_TASK in app._tasks:
        return
    options = {"base": InternalTask, "bind": True, "shared": False, "lazy": False}
    app.task(_dispatch, name=DISPATCH_TASK, **options)
    app.task(_maintain, name=MAINTAIN_TASK, **options)


def _dispatch(self: Any) -> int:
    """Publish what is due."""
    done = Outbox.of(self.app).dispatcher().drain(seconds=BEAT_INTERVAL)
    if done.outage is not None:
        log_event(
            logger, logging.WARNING, "outbox.dispatch_paused", error=type(done.outage).__name__
        )
    return done.published


def _maintain(self: Any) -> None:
    """Take back the jobs of silent workers and end what has expired."""
    Outbox.of(self.app).maintenance.run()
