"""The hold of an attempt on its job, up to the write that ends it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from celery_outbox.core.child_id import child_id
from celery_outbox.core.classification import error_code
from celery_outbox.core.states import State
from celery_outbox.exceptions import UncommittedCalls
from celery_outbox.execute.celery_versions import was_told_to_end
from celery_outbox.execute.fence import Fence, Write
from celery_outbox.execute.transaction import BodyTransaction
from celery_outbox.store.job import Job

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard


@dataclass(frozen=True)
class Lease:
    """The hold that an attempt has on its job.

    Attributes:
        by: the worker that holds it.
        until: when it ends without a heartbeat, as of the claim.
        token: grows with each attempt; every write of the attempt names it.
    """

    by: str
    until: datetime
    token: int


@dataclass
class Hold:
    """A job under a lease, and what is known of the end that was written for it.

    Attributes:
        settled: the attempt's end is written, or cannot be.
        ended: the state in which this attempt left its job.
        stale: the lease was lost, so that another attempt owns the job.
        unwritten: the database did not take the end; the message must come back.
        left: the body ended by what is no ``Exception``.
        replacing: the body goes on as another task, which is no failure.
        transaction: the body's transaction, while it is open.

    Of what the body enqueues, ``_calls`` counts equal calls by phase and fingerprint
    (:meth:`child_id`), and ``_called_in`` has, for each transaction that the body has to commit
    itself, a task that was called in it (:meth:`check_calls`).
    """

    guard: Guard
    task: Task
    job: Job
    lease: Lease
    settled: bool = False
    ended: State | None = None
    stale: bool = False
    unwritten: bool = False
    left: bool = False
    replacing: bool = False
    transaction: BodyTransaction | None = None
    _calls: defaultdict[tuple[str, str], Iterator[int]] = field(
        default_factory=lambda: defaultdict(itertools.count)
    )
    _called_in: dict[Any, str] = field(default_factory=dict)

    def note_call(self, task: str, transaction: Any) -> None:
        """A call of ``task`` was recorded in a transaction that the body has to commit."""
        if self.settled or transaction is None or transaction in self._called_in:
            return
        # A body may have any number of them, and each keeps its connection. In place: threads of
        # the body note theirs, too.
        for each in list(self._called_in):
            if not each.is_active:
                self._called_in.pop(each, None)
        self._called_in[transaction] = task

    def check_calls(self) -> None:
        """Refuse the success of a body that left the transaction of a call open: nobody commits
        it, and the call would be gone without a sign.

        Raises:
            UncommittedCalls: it was rolled back.
        """
        for transaction, task in list(self._called_in.items()):
            ours = self.transaction is not None and self.transaction.is_in(transaction)
            if transaction.is_active and not ours:
                # Before the end of the attempt is written: SQLite has one writer at a time.
                self.guard.undo_what_was_left(self.job.id)
                if transaction.is_active:
                    # An asynchronous one cannot be asked here, nor can a connection that is lost.
                    with suppress(SQLAlchemyError):
                        transaction.rollback()
                raise UncommittedCalls(job_id=self.job.id, task=self.task.name, called=task)

    @property
    def derives_child_ids(self) -> bool:
        """Whether the jobs that this one enqueues get the same ids in each attempt."""
        return bool(getattr(self.task, "derive_child_ids", True))

    def child_id(self, call: str) -> str:
        """The id of the next job that is enqueued by ``call``, a fingerprint.

        What hooks and signals enqueue after the end of an attempt belongs to that attempt: a
        duplicate delivery runs them again, the next attempt has its own, and so has one with the
        same number after a replay. The calls of a body belong to the part of the job's life that
        it is in: what it calls after a continuation that it asked for is asked for anew.
        """
        phase = f"after {self.lease.token}" if self.settled else f"part {self.job.part_number}"
        return child_id(self.job.id, phase, call, next(self._calls[phase, call]))

    @property
    def job_id(self) -> str:
        """The id of the job."""
        return self.job.id

    @property
    def number(self) -> int:
        """The number of this attempt, 1 for the first."""
        return self.job.attempt

    @property
    def has_succeeded(self) -> bool:
        """Whether the job's success is stored, by this attempt or an earlier one."""
        return self.ended is State.SUCCEEDED or self.job.state is State.SUCCEEDED

    @property
    def has_failed(self) -> bool:
        """Whether the job is in quarantine, by this attempt or an earlier one."""
        return self.ended is State.QUARANTINED or self.job.state is State.QUARANTINED

    @property
    def _fence(self) -> Fence:
        return Fence(self.guard.tables, self.job.id, self.lease.token, self.number, self.lease.by)

    @contextmanager
    def _open_transaction(self) -> Iterator[Session]:
        with self.guard.body_session() as session:
            self.transaction = BodyTransaction(self.guard, self.job, session)
            try:
                with self.transaction.guarded():
                    yield session
            finally:
                self.transaction = None

    def _settle(self, end: State, write: Write) -> bool:
        if self.transaction is not None:
            if end is State.SUCCEEDED or self.replacing:
                return self._commit(self.transaction, end, write)
            # Undone first: SQLite has one writer at a time.
            self.transaction.rollback()
        self.settled = True
        try:
            took = self._write_end(end, write)
            self.ended = end if took else None
        except (SQLAlchemyError, OSError, SoftTimeLimitExceeded) as error:
            self.unwritten = True
            raise Reject(error_code(error), requeue=True) from error
        return took

    def _commit(self, transaction: BodyTransaction, end: State, write: Write) -> bool:
        try:
            took = transaction.commit_with(write)
            self.settled, self.ended = True, end if took else None
        except Exception:
            # The error may have come when it was committed: only the database knows.
            if not self._has_ended(end):
                raise
            took = True
            self.settled, self.ended = True, end
        return took

    def _has_ended(self, end: State) -> bool:
        try:
            return self.guard.has_ended(self.job.id, self.lease.token, end)
        except (SQLAlchemyError, OSError, SoftTimeLimitExceeded) as error:
            self.settled = self.unwritten = True
            raise Reject(error_code(error), requeue=True) from error

    def _is_forgotten(self) -> bool:
        try:
            return self.guard.has_forgotten(self.job.id, self.lease.token)
        except (SQLAlchemyError, OSError, SoftTimeLimitExceeded):
            # It may be; a message that comes back without need changes nothing.
            return True

    def _write_end(self, end: State, write: Write) -> bool:
        runs = 0

        def counted(connection: Connection) -> bool:
            nonlocal runs
            runs += 1
            return write(connection)

        in_one = end is State.SUCCEEDED
        try:
            took = self.guard.settle(str(end), counted, in_one=in_one)
        except SoftTimeLimitExceeded:
            # The signal came in the middle of the write, which may or may not be committed.
            # Celery sends it once, and the lease token makes a second write harmless.
            took = self.guard.settle(str(end), counted, in_one=in_one)
        # A write that was made again, because the answer to its commit was lost, changes nothing
        # where the first one was committed.
        return took or (runs > 1 and self.guard.has_ended(self.job.id, self.lease.token, end))

    def _lose(self) -> Ignore | Reject:
        """The lease was lost: another attempt owns the job, this one has no say. Or the database
        has forgotten the claim in a crash: nobody owns the job, and its message comes back."""
        if not self.stale and not self.unwritten:
            if self.left and was_told_to_end():
                # By its own worker, whose main process has written the end.
                self.stale = True
                return Ignore(f"attempt {self.number} of job {self.job.id!r} was stopped")
            if self._is_forgotten():
                self.unwritten = True
            else:
                self.stale = True
                self.guard.note_stale(self.job, self.lease)
        if self.unwritten:
            return Reject(f"the claim of job {self.job.id!r} was lost", requeue=True)
        return Ignore(f"attempt {self.number} of job {self.job.id!r} lost its lease")
