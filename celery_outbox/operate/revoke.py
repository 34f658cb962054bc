"""``app.control.revoke``: a job that waits is cancelled in the database, whoever is up; then the
workers and the result backend are told, and not before the transaction is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery
from celery.exceptions import TaskRevokedError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.context import reporting
from celery_outbox.exceptions import OutboxError
from celery_outbox.log import cause, log_event
from celery_outbox.operate.control import Control, Revoked
from celery_outbox.operate.reports import request_of, tell_end
from celery_outbox.store.after_commit import after_commit
from celery_outbox.store.engine import is_autocommit
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox")

#: Tells the workers of some tasks; of all that were revoked with ``None``.
Send = Callable[[Sequence[Any] | None], Any]


class Revoke:
    """One revoke of many tasks.

    Arguments:
        app: the Celery app.
        control: cancels in the database.
        send: tells the workers.
    """

    def __init__(self, app: Celery, control: Control, send: Send) -> None:
        self._app = app
        self._control = control
        self._send = send

    def run(self, ids: Sequence[Any], connection: Connection | None, *, replies: bool) -> Any:
        """Cancel those that are jobs and wait, and tell.

        Arguments:
            ids: of jobs, and of whatever else Celery runs.
            connection: in whose transaction; ``None``: in one of its own.
            replies: the answers of the workers are asked for.

        Returns:
            The answers of the workers that were told already.

        Raises:
            sqlalchemy.exc.SQLAlchemyError, OutboxError: the database was not reached.
        """
        if connection is None or is_autocommit(connection):
            return self._now(ids)
        return self._within(connection, ids, replies)

    def _now(self, ids: Sequence[Any]) -> Any:
        try:
            revoked = self._control.revoke(ids)
        except (SQLAlchemyError, OutboxError):
            # A body that must be stopped is stopped all the same.
            self._send(None)
            raise
        try:
            return self._broadcast(None, revoked)
        finally:
            self._tell_backend(revoked)

    def _within(self, connection: Connection, ids: Sequence[Any], replies: bool) -> Any:
        revoked = self._control.revoke(ids, connection)
        if not revoked.cancelled:
            return self._broadcast(None, revoked)
        cancelled = [job.id for job in revoked.cancelled]

        def tell() -> None:
            self._broadcast(cancelled, Revoked(revoked.cancelled, False))
            self._tell_backend(revoked)

        after_commit(connection, tell)
        # The transaction has no say in the others.
        rest = [each for each in ids if each not in cancelled]
        if rest:
            return self._broadcast(rest, revoked)
        return [] if replies else None

    def _broadcast(self, only: Sequence[Any] | None, revoked: Revoked) -> Any:
        try:
            return self._send(only)
        except Exception as error:  # transports raise errors of their libraries
            if revoked.undecided:
                raise
            # The guard drops what the database says is cancelled.
            log_event(logger, logging.WARNING, "outbox.revoke_not_broadcast", error=cause(error))
            return None

    def _tell_backend(self, revoked: Revoked) -> None:
        for job in revoked.cancelled:
            if job.published_at is None:
                tell_backend(self._app, job)


def tell_backend(app: Celery, job: Job) -> None:
    """Tell the result backend that a job was revoked which no worker will ever meet."""
    try:
        with reporting(job.id):
            tell_end(app, job, request_of(app, job), TaskRevokedError("revoked"))
    except Exception:  # the result backend may be anything, and the job is cancelled
        log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=job.id)
