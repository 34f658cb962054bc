"""The transaction of a body: its writes, the jobs that it enqueues and its end are one commit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from celery_outbox.exceptions import CommitInBody, UnusableSession
from celery_outbox.execute.fence import Write
from celery_outbox.store.engine import begin_immediate, connection_in, is_autocommit

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard
    from celery_outbox.store.database import Database
    from celery_outbox.store.job import Job


def undo(session: Session, database: Database) -> None:
    """Roll a session back, also where its database is silent or its connection gone."""
    limit: AbstractContextManager[Any] = nullcontext()
    # A connection that is gone has undone it.
    with contextlib.suppress(SQLAlchemyError):
        if session.in_transaction() and session.is_active:
            limit = database.limit(connection_in(session, database.tables))
    with contextlib.suppress(SQLAlchemyError), limit:
        session.rollback()


class BodyTransaction:
    """One transaction, from the beginning of the body to its only commit.

    Arguments:
        guard: knows the tables.
        job: whose body it is.
        session: the session that the body works with.

    Raises:
        UnusableSession: the session is in autocommit.
        SchemaError: its database does not hold the outbox tables.
    """

    def __init__(self, guard: Guard, job: Job, session: Session) -> None:
        self.session = session
        self.job_id = job.id
        self._task = job.task
        self._database = guard.database
        self._committing = False
        if not session.in_transaction():
            # A session that does not begin by itself (autobegin=False).
            session.begin()
        connection = self._connection()
        if is_autocommit(connection):
            remedy = "its connections are in autocommit, so nothing can be committed together"
            raise UnusableSession(task=self._task, kind=type(session).__name__, remedy=remedy)
        guard.database.ensure_ready(connection)
        # A transaction that reads first and writes later may find the database locked.
        begin_immediate(connection)

    def commit_with(self, write: Write) -> bool:
        """Commit what the body did together with the end of its attempt.

        Returns:
            Whether it was committed; ``False``: the lease was lost, all is rolled back.

        Raises:
            Exception: what the body wrote cannot be stored, or the database is away; whether
                it was committed is not known.
        """
        try:
            # What the body wrote takes as long as it takes, like the body.
            self.session.flush()
            # Before the fence: it locks the job's row, and what the body called may take long. Only
            # what `write` itself records for a replacement comes behind it.
            self._database.buffers.write(self._connection())
            with self._database.limit(self._connection()):
                if not write(self._connection()):
                    self.rollback()
                    return False
                self._commit()
        except Exception:
            self.rollback()
            raise
        return True

    def is_in(self, transaction: Any) -> bool:
        """Whether what was written in a transaction of SQLAlchemy Core belongs to this one."""
        return self._connection().get_transaction() is transaction

    def rollback(self) -> None:
        """Undo what the body did. Harmless when repeated."""
        undo(self.session, self._database)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Refuse, in this block, a commit by the body; roll back at its end what is left."""
        connection = self._connection()
        event.listen(self.session, "before_commit", self._refuse_commit)
        event.listen(connection, "commit", self._refuse_commit_below)
        try:
            yield
        finally:
            event.remove(self.session, "before_commit", self._refuse_commit)
            event.remove(connection, "commit", self._refuse_commit_below)
            self.rollback()

    def _commit(self) -> None:
        self._committing = True
        try:
            self.session.commit()
        finally:
            self._committing = False

    def _connection(self) -> Connection:
        return connection_in(self.session, self._database.tables)

    def _refuse_commit(self, session: Any) -> None:
        # The end of a savepoint comes here, too.
        if not self._committing and not session.in_nested_transaction():
            raise CommitInBody(job_id=self.job_id, task=self._task)

    def _refuse_commit_below(self, connection: Connection) -> None:
        # By session.connection().commit(), past the session.
        if not self._committing:
            raise CommitInBody(job_id=self.job_id, task=self._task)
