"""What a person does: look at jobs, cancel them, and decide about those in quarantine."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

from sqlalchemy import Connection

from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State, Transition, sources
from celery_outbox.exceptions import NotReplayable, UnknownJob, WrongState
from celery_outbox.execute.delivery import VERSION_HEADER
from celery_outbox.operate.status import JobStatus, QuarantineEntry
from celery_outbox.store import job as jobs
from celery_outbox.store import journal, quarantining, transitions
from celery_outbox.store.database import Database
from celery_outbox.store.job import Job
from celery_outbox.store.journal import Event
from celery_outbox.store.recording import NO_TASK


class Revoked(NamedTuple):
    """What became of tasks that were revoked.

    Attributes:
        cancelled: the jobs that were cancelled, as they were before.
        undecided: there are others that are no jobs, or that run.
    """

    cancelled: list[Job]
    undecided: bool


class Control:
    """Operates on the jobs of one outbox.

    Arguments:
        database: the outbox tables.
        is_plain_task: whether the app has a task of this name that does not use the outbox.
    """

    def __init__(self, database: Database, *, is_plain_task: Callable[[str], bool]) -> None:
        self._database = database
        self._is_plain_task = is_plain_task
        self._tables = database.tables

    def status(self, job_id: str) -> JobStatus:
        """Where a job is.

        Raises:
            UnknownJob: there is none with this id.
        """
        return JobStatus.of(self._get(job_id))

    def journal(self, job_id: str) -> list[Event]:
        """Everything that happened to a job, oldest first.

        Raises:
            UnknownJob: the journal knows nothing of it.
        """
        events: list[Event] = self._database.read(
            lambda connection: journal.read(connection, self._tables, job_id)
        )
        if not events:
            raise UnknownJob(job_id=job_id)
        return events

    def find(
        self,
        *,
        state: str | None = None,
        task: str | None = None,
        queue: str | None = None,
        error_code: str | None = None,
        older_than: timedelta | None = None,
        limit: int = 100,
    ) -> list[JobStatus]:
        """The newest jobs that match every given filter.

        Raises:
            ValueError: there is no such state.
        """
        states = frozenset() if state is None else frozenset({State(state)})
        return [
            JobStatus.of(job)
            for job in self._find(
                states=states,
                task=task,
                queue=queue,
                error_code=error_code,
                older_than=older_than,
                limit=limit,
            )
        ]

    def quarantined(
        self, *, task: str | None = None, queue: str | None = None, limit: int = 100
    ) -> list[QuarantineEntry]:
        """The newest jobs that wait for a person."""
        found = self._find(
            states=frozenset({State.QUARANTINED}), task=task, queue=queue, limit=limit
        )
        return [QuarantineEntry.of(job) for job in found]

    def quarantine_entry(self, job_id: str) -> QuarantineEntry:
        """One job that waits for a person.

        Raises:
            UnknownJob: there is no such job.
            WrongState: it is not in quarantine.
        """
        job = self._get(job_id)
        if job.state is not State.QUARANTINED:
            raise _wrong_state(job, "showing its quarantine entry", Transition.REPLAY)
        return QuarantineEntry.of(job)

    def replay(self, job_id: str) -> None:
        """Send a quarantined job back to the queue, with all its attempts before it.

        Raises:
            UnknownJob, WrongState: see :meth:`quarantine_entry`.
            NotReplayable: its arguments were never recorded, or it is of no task.
        """

        def work(connection: Connection, job: Job) -> bool:
            if job.state is State.QUARANTINED:
                _check_replayable(job)
            return quarantining.replay(
                connection, self._tables, job, relay=self._relays(job), actor=person()
            )

        self._act(job_id, Transition.REPLAY, "replay", work)

    def discard(self, job_id: str) -> None:
        """Give a quarantined job up.

        Raises:
            UnknownJob, WrongState: see :meth:`quarantine_entry`.
        """
        self._act(
            job_id,
            Transition.DISCARD,
            "discard",
            lambda connection, job: quarantining.discard(
                connection, self._tables, job, actor=person()
            ),
        )

    def cancel(self, job_id: str, connection: Connection | None = None) -> None:
        """Take a job back that no worker has begun.

        Arguments:
            connection: in whose transaction; by default in one of its own.

        Raises:
            UnknownJob: there is no such job.
            WrongState: it is running or has ended.
        """
        self._act(
            job_id,
            Transition.CANCEL,
            "cancel",
            lambda connection, job: transitions.cancel(
                connection, self._tables, job, actor=person()
            ),
            connection,
        )

    def revoke(self, task_ids: Iterable[Any], connection: Connection | None = None) -> Revoked:
        """Cancel those of many tasks that are jobs and wait.

        Arguments:
            task_ids: of jobs, and of whatever else Celery runs.
            connection: in whose transaction; by default in one of its own.

        Returns:
            What was cancelled, and what the database has no say in.
        """
        # Sorted: two that revoke the same jobs lock them in the same order.
        usable = sorted({each for each in task_ids if isinstance(each, str) and "\x00" not in each})
        if not usable:
            return Revoked([], True)

        def work(connection: Connection) -> Revoked:
            cancelled, undecided = [], False
            for job_id in usable:
                job = jobs.get(connection, self._tables, job_id)
                if job is not None and job.state is not State.RUNNING:
                    # Not one that runs: its worker, which is to stop it, would wait for its row.
                    job = jobs.lock(connection, self._tables, job_id)
                if job is None or job.state is State.RUNNING:
                    undecided = True
                elif transitions.cancel(connection, self._tables, job, actor=person()):
                    cancelled.append(job)
            return Revoked(cancelled, undecided)

        return self._in(connection, work)

    def _in(self, connection: Connection | None, work: Callable[[Connection], Any]) -> Any:
        if connection is None:
            return self._database.write(work)
        self._database.ensure_ready(connection)
        return work(connection)

    def _get(self, job_id: str) -> Job:
        # PostgreSQL's drivers refuse NUL, which no job id has.
        job = None
        if "\x00" not in job_id:
            job = self._database.read(lambda c: jobs.get(c, self._tables, job_id))
        if job is None:
            raise UnknownJob(job_id=job_id)
        return job

    def _act(
        self,
        job_id: str,
        transition: Transition,
        action: str,
        work: Callable[[Connection, Job], bool],
        connection: Connection | None = None,
    ) -> None:
        def locked(connection: Connection) -> None:
            job = jobs.lock(connection, self._tables, job_id)
            if job is None:
                raise UnknownJob(job_id=job_id)
            if not work(connection, job):
                raise _wrong_state(job, action, transition)

        self._in(connection, locked)

    def _relays(self, job: Job) -> bool:
        """Whether the worker needs the whole message, because its task has no guard."""
        unknown = job.reason == Reason.UNKNOWN_TASK
        return job.relay or (unknown and self._is_plain_task(job.task))

    def _find(self, **filters: Any) -> list[Job]:
        found: list[Job] = self._database.read(
            lambda connection: jobs.find(connection, self._tables, **filters)
        )
        return found


def person() -> str:
    """Who acts, for the journal: the user and the host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        # A user id without an entry, as in a container.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _check_replayable(job: Job) -> None:
    if job.task == NO_TASK:
        problem = "its message names no task that it could be sent to"
        raise NotReplayable(job_id=job.id, problem=problem)
    if job.body is None or _came_without_arguments(job):
        raise NotReplayable(job_id=job.id, problem="its arguments were never recorded")


def _came_without_arguments(job: Job) -> bool:
    """Whether the row was made from a message that had gone through an outbox."""
    try:
        return VERSION_HEADER in job.envelope.headers
    except (ValueError, TypeError):
        # The dispatcher says what is wrong with such a row.
        return False


def _wrong_state(job: Job, action: str, transition: Transition) -> WrongState:
    allowed = " or ".join(sorted(str(state) for state in sources(transition)))
    return WrongState(job_id=job.id, state=str(job.state), action=action, allowed=allowed)
