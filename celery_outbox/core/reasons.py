"""Why a job stands in quarantine: stable words that scripts may rely on."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """The ``reason`` of a quarantined job."""

    #: The error will not pass by itself (see :mod:`celery_outbox.core.classification`).
    PERMANENT = "permanent"
    #: Every attempt failed with an error that might have passed.
    ATTEMPTS_EXHAUSTED = "attempts_exhausted"
    #: The last permitted attempt ended with its worker.
    LOST_WORKER = "lost_worker"
    #: The last permitted attempt ran into its time limit.
    TIME_LIMIT = "time_limit"
    #: The body raised ``celery.exceptions.Reject(requeue=False)``.
    REJECTED = "rejected"
    #: The broker has no queue for the message.
    UNROUTABLE = "unroutable"
    #: The broker does not take a message of this size.
    TOO_LARGE = "too_large"
    #: The stored message cannot be turned into one that the transport takes.
    UNPUBLISHABLE = "unpublishable"
    #: No worker that met the job knows its task.
    UNKNOWN_TASK = "unknown_task"
    #: The payload cannot be read, or its content type is not accepted.
    UNDECODABLE = "undecodable"
    #: A message named a job that the database does not have.
    UNKNOWN_JOB = "unknown_job"
    #: A message has not the form of a task message: no task, no usable id, a wrong type.
    MALFORMED = "malformed"
    #: A message of another client has the id of a job that is of another task.
    ID_TAKEN = "id_taken"

    def __str__(self) -> str:
        return self.value


class Source(str, Enum):
    """Who put a job into quarantine."""

    #: A worker (or maintenance) that ended an attempt.
    SETTLE = "settle"
    #: What the broker answered, or what came out of it.
    BROKER = "broker"

    def __str__(self) -> str:
        return self.value
