"""Tells Celery's side (result backend, chords, error callbacks) of ends that no worker may ever
meet: given up by the maintenance, refused by the dispatcher, expired before they were delivered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.app.task import Context
from celery.exceptions import NotRegistered, TaskRevokedError

from celery_outbox.context import reporting
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.exceptions import JobQuarantined
from celery_outbox.execute.callback_id import fix_callback_ids
from celery_outbox.execute.payload import Undecodable, decode_call
from celery_outbox.log import log_event
from celery_outbox.store import job as jobs
from celery_outbox.store import reports as store
from celery_outbox.store.database import Database
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox.operate")

#: Ends that one run tells of.
BATCH = 100

#: The shortest and the longest time after which one that could not be told is tried again, and the
#: time since the end after which it is tried no more.
SOON, LATER, TOO_LATE = timedelta(seconds=10), timedelta(hours=1), timedelta(days=1)


class Reports:
    """Finds ends that nobody has told of, and tells of them, at least once.

    Arguments:
        app: the Celery app, whose result backend hears of it.
        database: the outbox tables.
    """

    def __init__(self, app: Celery, database: Database) -> None:
        self._app = app
        self._database = database

    def tell(self) -> int:
        """Tell of what is due; returns of how many jobs.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database is away.
        """
        tables = self._database.tables
        found = self._database.read(lambda c: store.due(c, tables, BATCH))
        return sum(self._tell(job_id) for job_id in found)

    def _tell(self, job_id: str) -> bool:
        tables = self._database.tables
        job = self._database.read(lambda c: jobs.get(c, tables, job_id))
        if job is None or job.report_at is None or job.finished_at is None:
            return False
        age = job.now - job.finished_at
        again = None if age >= TOO_LATE else job.now + min(max(age, SOON), LATER)
        # First: if this one hangs, or takes the process with it, the others get their turn.
        if not self._database.write(lambda c: store.mark(c, tables, job, again)):
            return False
        try:
            with reporting(job.id):
                tell_end(self._app, job, request_of(self._app, job))
        except Exception:  # the result backend may be anything, and the job has ended
            log_event(
                logger,
                logging.ERROR,
                "outbox.report_failed",
                exc_info=True,
                job=job.id,
                given_up=again is None,
            )
            return False
        if again is not None:
            marked = replace(job, report_at=again)
            self._database.write(lambda c: store.mark(c, tables, marked, None))
        return True


def tell_end(app: Celery, job: Job, request: Context, error: Exception | None = None) -> None:
    """Tell the result backend of a job's end as a worker does; it counts members of chords and
    calls the error callbacks. To be called while :func:`~celery_outbox.context.reporting`.

    Arguments:
        request: what :func:`request_of` makes of the job.
        error: what it ended with; by default what its state says.

    Raises:
        Exception: what the result backend raises.
    """
    error = error_of(job) if error is None else error
    task = app.tasks.get(job.task)
    backend = (app if task is None else task).backend
    stores = not request.ignore_result
    if isinstance(error, TaskRevokedError):
        backend.mark_as_revoked(job.id, str(error), request=request, store_result=stores)
    else:
        stores = stores or bool(getattr(task, "store_errors_even_if_ignored", False))
        backend.mark_as_failure(job.id, error, request=request, store_result=stores)


def request_of(app: Celery, job: Job) -> Context:
    """The request of a job, as far as its row can be read: where its result goes, and who is to be
    called."""
    headers: Mapping[str, Any] = {}
    parts: dict[str, Any] = {}
    embed: dict[str, Any] = {}
    try:
        headers, properties = job.envelope.headers, job.envelope.properties
        parts = {name: properties.get(name) for name in ("reply_to", "correlation_id")}
        call = decode_call(app, job)
        embed = {**call.embed, "args": call.args, "kwargs": call.kwargs}
    except (Undecodable, ValueError, TypeError, KeyError, AttributeError):
        # The chord of a member is kept in its row, too.
        log_event(logger, logging.DEBUG, "outbox.request_unreadable", job=job.id)
    fix_callback_ids(job.id, "link_error", embed.get("errbacks"))
    return Context({**headers, **parts, **embed, "id": job.id, "delivery_info": {}})


def error_of(job: Job) -> Exception:
    """The error that stands for the end of a job that did not succeed."""
    if job.state in (State.CANCELLED, State.EXPIRED):
        return TaskRevokedError(str(job.state))
    if job.reason == str(Reason.UNKNOWN_TASK):
        # As the worker that met its message has said.
        return NotRegistered(job.task)
    return JobQuarantined(job.id, str(job.reason), job.error_code)
