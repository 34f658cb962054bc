"""Finds an app's tasks by their names, also those that only its workers have imported so far."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox")


class TaskNames:
    """The names of one app's tasks.

    Arguments:
        app: the Celery app.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._has_imported = False

    def find(self, name: str) -> Any:
        """The task of this name, if the app has one; what a worker imports is imported once."""
        tasks = self._app.tasks
        if name not in tasks and not self._has_imported:
            self._has_imported = True
            try:
                self._app.loader.import_default_modules()
            except Exception:
                # The call is relayed then, and a worker that has the task runs it as its own.
                log_event(logger, logging.WARNING, "outbox.import_failed", exc_info=True)
        return tasks.get(name)

    def is_plain(self, name: str) -> bool:
        """Whether the app has a task of this name that does not use the outbox."""
        # What a worker imports, a web process or the command line may not have yet.
        self._app.loader.import_default_modules()
        task = self._app.tasks.get(name)
        return task is not None and not hasattr(type(task), "outbox")
