"""What is current: the session that calls are recorded in, and the job that a worker runs.

Held in context variables, so threads and async tasks do not see each other's.
"""

from __future__ import annotations

from contextvars import ContextVar
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
