"""Whose transaction a call belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery._state import get_current_worker_task
from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from celery_outbox.context import RunningJob, is_callback, running_job
from celery_outbox.exceptions import UnusableSession
from celery_outbox.record.binding import begun, connection_of
from celery_outbox.store.schema import Tables


class _Used(NamedTuple):
    """A session that calls are recorded in, and the job or report that said so."""

    session: Any
    by: RunningJob | None


class Owners:
    """The sessions in which one outbox records.

    Arguments:
        configured: the application's own session, or what returns it.
    """

    def __init__(self, configured: Any) -> None:
        self._configured = configured
        self._ambient: ContextVar[_Used | None] = ContextVar("outbox_session", default=None)

    @contextmanager
    def use(self, session: Any) -> Iterator[None]:
        """A block that says in whose transaction its calls are.

        Raises:
            UnusableSession: there is no session.
        """
        if session is None:
            raise UnusableSession(task="(any)", kind="NoneType", remedy="pass a session")
        token = self._ambient.set(_Used(session, running_job.get()))
        try:
            yield
        finally:
            self._ambient.reset(token)

    def used(self) -> Any:
        """What the innermost block says, unless a job or a report has begun in it, which has
        nothing to do with that transaction."""
        used = self._ambient.get()
        return used.session if used is not None and used.by is running_job.get() else None

    def open_session(self) -> Session | None:
        """The Session of a block, or the configured one if a transaction has begun in it."""
        return _session_of(self.used() or self._begun())

    def used_session(self) -> Session | None:
        """The Session of a block."""
        return _session_of(self.used())

    def body_session(self) -> Any:
        """The configured session for a transaction that is begun now; ``None``: there is none, or
        it is not that of what runs here."""
        return None if self._configured is None or is_callback() else self._configured()

    def of_call(self, session: Any) -> tuple[Any, ...]:
        """Whose transaction a call belongs to: the first of these that is there.

        Arguments:
            session: what the call names.
        """
        if is_callback():
            # Celery sends callbacks when the body is over, and nobody would commit for them.
            return (session, self.used())
        # In a worker no framework commits a session that the body has not touched.
        in_worker = running_job.get() is not None or _runs_plain_task()
        configured = self._begun if in_worker else self._configured
        return (session, self.used(), configured)

    def connection(self, session: Any, tables: Tables) -> Connection | None:
        """In whose transaction a job is changed; ``None``: in one of its own.

        Arguments:
            session: what the caller names.

        Raises:
            UnusableSession: it cannot ask its database here.
        """
        for owner in (session, self.used(), self._begun()):
            connection = connection_of(owner, tables, "(any)")
            if connection is not None:
                return connection
        return None

    def _begun(self) -> Any:
        return None if is_callback() else begun(self._configured)


def _session_of(owner: Any) -> Session | None:
    if isinstance(owner, scoped_session):
        owner = owner()
    return owner if isinstance(owner, Session) else None


def _runs_plain_task() -> bool:
    """Whether a worker runs a task without the outbox here."""
    task = get_current_worker_task()
    return task is not None and not task.request.is_eager
