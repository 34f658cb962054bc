"""The answer to "where is it?": a job as people and scripts see it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from celery_outbox.store.job import Job


@dataclass(frozen=True)
class LeaseStatus:
    """Who holds a running job, until when, and under which token."""

    by: str
    until: datetime
    token: int


@dataclass(frozen=True)
class JobStatus:
    """Where a job is, what became of it and why.

    Attributes:
        deliveries: how often a worker got a message of the job.
        published_at: when the broker last confirmed a message of the job.
        reason: why it is in quarantine.
    """

    id: str
    task: str
    queue: str | None
    state: str
    attempt: int
    max_attempts: int
    deliveries: int
    recorded_at: datetime
    available_at: datetime
    published_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    result_key: str | None
    error_code: str | None
    reason: str | None
    lease: LeaseStatus | None

    @classmethod
    def of(cls, job: Job) -> JobStatus:
        """The status of a job's row."""
        lease = None
        if job.leased_by is not None and job.leased_until is not None:
            lease = LeaseStatus(job.leased_by, job.leased_until, job.lease_token)
        same = (name for name in cls.__dataclass_fields__ if name not in ("state", "lease"))
        return cls(**{name: getattr(job, name) for name in same}, state=str(job.state), lease=lease)

    def as_json(self) -> dict[str, Any]:
        """Plain data; times are ISO 8601 in UTC."""
        return as_plain(asdict(self))


@dataclass(frozen=True)
class QuarantineEntry:
    """A job that waits for a person.

    Attributes:
        source: ``settle``: an attempt ended here; ``broker``: its message did.
    """

    id: str
    task: str
    queue: str | None
    reason: str
    error_code: str | None
    attempt: int
    at: datetime | None
    source: str | None

    @classmethod
    def of(cls, job: Job) -> QuarantineEntry:
        """The entry of a quarantined job's row."""
        return cls(
            id=job.id,
            task=job.task,
            queue=job.queue,
            reason=job.reason or "",
            error_code=job.error_code,
            attempt=job.attempt,
            at=job.finished_at,
            source=job.source,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data; times are ISO 8601 in UTC."""
        return as_plain(asdict(self))


def as_plain(values: dict[str, Any]) -> dict[str, Any]:
    """Replace datetimes by ISO 8601 text, also in nested dictionaries."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, datetime):
            plain[name] = value.isoformat()
        elif isinstance(value, dict):
            plain[name] = as_plain(value)
        else:
            plain[name] = value
    return plain
