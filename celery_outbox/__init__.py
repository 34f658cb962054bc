"""celery-outbox: Celery tasks that are recorded in a transaction, run under a guard, and end
where a person can see it."""

# Setting up
from celery_outbox import hooks as _hooks  # noqa: F401 - registers with Celery
from celery_outbox.app import Outbox

# Failing and retrying
from celery_outbox.core.retry import RetryPolicy

# Errors
from celery_outbox.exceptions import (
    CommitInBody,
    ConfigurationError,
    DispatcherStuck,
    InvalidDelay,
    InvalidJobId,
    InvalidResultKey,
    InvalidStoreKey,
    JobIdTaken,
    JobQuarantined,
    LeaseLost,
    LostRace,
    NameTooLong,
    NotAvailable,
    NotInJob,
    NoTransaction,
    NotReplayable,
    NotWritten,
    OutboxError,
    PayloadTooLarge,
    PermanentError,
    RecordError,
    ResultMissing,
    ResultStoreError,
    RetryableError,
    SchemaError,
    SchemaMismatch,
    SchemaMissing,
    TaskError,
    TooLargeForDatabase,
    TransactionOver,
    UnknownJob,
    UnserializableArgument,
    UnusableSession,
    WrongDatabase,
    WrongState,
)

# Results
from celery_outbox.execute.result_store import FileStore, ResultStore

# Looking
from celery_outbox.operate.status import JobStatus, QuarantineEntry
from celery_outbox.task import OutboxTask

__version__ = "0.1.0"

__all__ = [
    "CommitInBody",
    "ConfigurationError",
    "DispatcherStuck",
    "FileStore",
    "InvalidDelay",
    "InvalidJobId",
    "InvalidResultKey",
    "InvalidStoreKey",
    "JobIdTaken",
    "JobQuarantined",
    "JobStatus",
    "LeaseLost",
    "LostRace",
    "NameTooLong",
    "NoTransaction",
    "NotAvailable",
    "NotInJob",
    "NotReplayable",
    "NotWritten",
    "Outbox",
    "OutboxError",
    "OutboxTask",
    "PayloadTooLarge",
    "PermanentError",
    "QuarantineEntry",
    "RecordError",
    "ResultMissing",
    "ResultStore",
    "ResultStoreError",
    "RetryPolicy",
    "RetryableError",
    "SchemaError",
    "SchemaMismatch",
    "SchemaMissing",
    "TaskError",
    "TooLargeForDatabase",
    "TransactionOver",
    "UnknownJob",
    "UnserializableArgument",
    "UnusableSession",
    "WrongDatabase",
    "WrongState",
]
