"""What the database, the broker and the files show of one job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, func, select

from celery_outbox import Outbox
from example_project.models import Run
from example_project.play.broker import Broker


@dataclass(frozen=True)
class Seen:
    """One look.

    Attributes:
        published_at: when the outbox row was marked as published; ``None``: it is not.
        outbox_rows: outbox rows of the job that are still to be published.
        journal: the job's events, oldest first.
        waiting, quarantined: messages in the two queues.
        files: the report files that bear the job's id.
        stamp: inode and time of the job's file: another one would show here.
        runs: how often the body of the task began.
    """

    job_id: str
    state: str
    attempt: int
    max_attempts: int
    deliveries: int
    published_at: datetime | None
    outbox_rows: int
    reason: str | None
    journal: tuple[str, ...]
    waiting: int
    quarantined: int
    files: tuple[str, ...]
    stamp: tuple[int, int] | None
    runs: int

    @property
    def at_rest(self) -> bool:
        """Whether nothing is on its way to a worker."""
        return self.waiting == 0 and self.outbox_rows == 0

    @property
    def file(self) -> str:
        """The name of the one file that the job is to have."""
        return f"reports/{self.job_id}.csv"


def look(outbox: Outbox, engine: Engine, broker: Broker, folder: Path) -> Callable[[str], Seen]:
    """A function that looks at the job with a given id."""

    def see(job_id: str) -> Seen:
        job = outbox.job(job_id)
        message = outbox.tables.message.c
        unpublished = select(func.count()).where(
            message.job_id == job_id, message.published_at.is_(None)
        )
        with engine.connect() as connection:
            outbox_rows = connection.scalar(unpublished)
            runs = connection.scalar(select(func.count()).where(Run.job_id == job_id))
        reports = sorted((folder / "reports").glob("*"))
        files = [path for path in reports if job_id in path.name and path.is_file()]
        stamps = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
        return Seen(
            job_id=job_id,
            state=job.state,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            deliveries=job.deliveries,
            published_at=job.published_at,
            outbox_rows=outbox_rows or 0,
            reason=job.reason,
            journal=tuple(event.event for event in outbox.control.journal(job_id)),
            waiting=broker.waiting(),
            quarantined=broker.quarantined(),
            files=tuple(str(path.relative_to(folder)) for path in files),
            stamp=stamps[0] if stamps else None,
            runs=runs or 0,
        )

    return see
