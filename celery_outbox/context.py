"""What is current: the job that a worker runs, or whose end is told.

Held in a context variable, so threads and async tasks do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from celery_outbox.store.recording import NewJob


class RunningJob(Protocol):
    """The attempt that this thread or greenlet is executing, as recording sees it."""

    @property
    def job_id(self) -> str:
        """The id of the job."""

    @property
    def settled(self) -> bool:
        """The body has ended: what is sent now are callbacks."""

    @property
    def derives_child_ids(self) -> bool:
        """Whether the jobs that it enqueues get the same ids in each attempt."""

    def child_id(self, call: str) -> str:
        """The id of the next job that is enqueued by ``call``, a fingerprint."""

    def note_call(self, task: str, transaction: Any) -> None:
        """A call of ``task`` was recorded in a transaction that somebody else has to commit."""

    def resume_as(self, new: NewJob) -> None:
        """Go on later as ``new``: the body sent its own id again (``self.retry``)."""


#: The attempt that is being executed here, if one is.
running_job: ContextVar[RunningJob | None] = ContextVar("outbox_running_job", default=None)


@dataclass(frozen=True)
class Reported:
    """Stands for a job whose end is told to Celery's side by somebody who does not run it."""

    job_id: str
    settled: bool = True
    derives_child_ids: bool = False

    def child_id(self, call: str) -> str:
        """Not asked for: what is sent has a fixed id, or a new one."""
        raise NotImplementedError

    def note_call(self, task: str, transaction: Any) -> None:
        """Nobody waits for it."""

    def resume_as(self, new: NewJob) -> None:
        """There is a job with this id, and it has ended."""


@contextmanager
def reporting(job_id: str) -> Iterator[None]:
    """A block that tells Celery's side of the end of a job. What is called in it are callbacks:
    they get a transaction of their own, since nobody commits for them, whatever session is open.

    Arguments:
        job_id: the id of the job, or of a chord.
    """
    if is_callback():
        yield
        return
    token = running_job.set(Reported(job_id))
    try:
        yield
    finally:
        running_job.reset(token)


@contextmanager
def of_no_job() -> Iterator[None]:
    """A block whose calls are not those of the job that is executed here."""
    token = running_job.set(None)
    try:
        yield
    finally:
        running_job.reset(token)


def is_callback() -> bool:
    """Whether what is called here follows the end of a job: Celery's callbacks, hooks, signals."""
    running = running_job.get()
    return running is not None and running.settled
