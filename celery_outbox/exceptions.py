"""Every error of this package. The docstring of a class is its message; facts are attributes."""

from __future__ import annotations

import inspect
from typing import Any


class OutboxError(Exception):
    """Something went wrong in celery-outbox."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        super().__init__(str(self))

    def __str__(self) -> str:
        text = " ".join(inspect.cleandoc(type(self).__doc__ or "").split())
        return text.format(**self.facts).strip()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.facts)


def _rebuild(kind: type[OutboxError], facts: dict[str, Any]) -> OutboxError:
    return kind(**facts)


class ConfigurationError(OutboxError):
    """Setting {setting} is not usable: {problem}. {remedy}"""


class SchemaError(OutboxError):
    """The outbox tables in the database do not fit this version of celery-outbox."""


class SchemaMissing(SchemaError):
    """The outbox tables are missing in {database}: run `celery -A yourapp outbox init`."""


class SchemaMismatch(SchemaError):
    """The outbox tables in {database} have version {found}, this package needs version
    {needed}: {remedy}."""


class RecordError(OutboxError):
    """A call could not be recorded; nothing was written."""


class InvalidJobId(RecordError):
    """{job_id!r} cannot be a job id for task {task}: {problem}. Pass a task_id of 1 to 255
    characters without NUL, or none."""


class UnserializableArgument(RecordError):
    """Task {task} cannot be recorded: {argument} (type {kind}) cannot be serialized with
    {serializer!r}. Pass data instead of objects, or register a type with
    kombu.utils.json.register_type."""


class PayloadTooLarge(RecordError):
    """Task {task} cannot be recorded: its arguments take {size} bytes and the limit is {limit}.
    Pass a reference to the data, or raise outbox_max_payload_size."""


class TooLargeForDatabase(RecordError):
    """What is to be stored takes {size} bytes on its way, and the database takes {limit} at once.
    Pass or return a reference to the data, or raise max_allowed_packet of the server."""


class InvalidDelay(RecordError):
    """Task {task} cannot be recorded: {option}={value!r} is not a time ({problem}). Use seconds
    for countdown, and a datetime or ISO 8601 text for eta."""


class NameTooLong(RecordError):
    """Task {task} cannot be recorded: its {what} has more than {limit} characters."""


class JobIdTaken(RecordError):
    """Task {task} cannot be recorded as {job_id!r}: that is a job of task {owner}. Ids are keys
    across all tasks: put the operation's name into them."""


class InvalidResultKey(RecordError):
    """Task {task} has no usable result key: {template!r} does not work ({problem}). It may hold
    {{job_id}}, positions of arguments like {{0}}, and names of keyword arguments."""


class NoTransaction(RecordError):
    """Task {task} was called outside a transaction and outbox_require_transaction is set. Use
    `with outbox.use(session):` or `apply_async(..., session=session)`."""


class UnusableSession(RecordError):
    """Task {task} cannot be recorded through a {kind}: {remedy}."""


class WrongDatabase(RecordError):
    """The session's database is {found}, and the outbox is in {needed}. Use a session of that
    database, or bind the outbox's job table to it: Session(binds={{outbox.tables.job: engine}})."""


class NotWritten(RecordError):
    """{count} calls of this transaction cannot be written: {problem}. Nothing of it may be
    committed: roll it back. Commit through SQLAlchemy, or call outbox.write(session) before
    you commit in another way."""


class UnknownJob(OutboxError):
    """There is no job {job_id!r}: the transaction of its call was not committed, its task is not an
    OutboxTask, or it is in another database."""


class WrongState(OutboxError):
    """Job {job_id!r} is {state}: {action} is only possible while it is {allowed}."""


class NotReplayable(OutboxError):
    """Job {job_id!r} cannot be replayed: {problem}."""


class LostRace(OutboxError):
    """Job {job_id!r} changed while it was locked: is the engine in autocommit?"""


class ResultStoreError(OutboxError):
    """Something went wrong in a result store."""


class InvalidStoreKey(ResultStoreError):
    """{key!r} cannot be a key of a result store: {problem}."""


class ResultMissing(ResultStoreError):
    """Task {task} returned, but its result {key!r} is not in the result store."""


class NotAvailable(OutboxError):
    """This version of celery-outbox does not have {what}. {remedy}"""


class DispatcherStuck(OutboxError):
    """Dispatcher {dispatcher} was told to end and its database or broker does not answer: it is
    left behind. What it had claimed is published by another one when its claim ends."""


class LeaseLost(OutboxError):
    """Attempt {attempt} of job {job_id!r} has lost its lease, and the job is another attempt's:
    nothing that its transaction wrote was committed."""


class CommitInBody(OutboxError):
    """The body of job {job_id!r} (task {task}) committed its session itself. Return, or leave the
    block, instead: the commit is made then, together with the end of the job."""


class UncommittedCalls(OutboxError):
    """The body of job {job_id!r} (task {task}) called {called!r} in a transaction that it left
    open: nobody would commit it, so the call and what else was written there were rolled back.
    Commit the session in the body, or use transactional=True."""


class TransactionOver(OutboxError):
    """Job {job_id!r} (task {task}) cannot begin a transaction: {problem}. {remedy}"""


class NotInJob(OutboxError):
    """{what} is only available while a worker runs a job of task {task}."""


class TaskError(Exception):
    """Base of the errors that a task body raises to say what follows."""


class PermanentError(TaskError):
    """Another attempt would fail the same way: the job goes to quarantine at once."""


class RetryableError(TaskError):
    """The error may pass: another attempt follows, as far as the task's limit permits.

    Arguments:
        message: what went wrong.
        retry_after: seconds to wait at least before the next attempt.
    """

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return str(self.args[0])


class JobQuarantined(Exception):
    """The failure of a quarantined job, told again for a delivery that came back."""

    def __init__(self, job_id: str, reason: str, error_code: str | None) -> None:
        super().__init__(job_id, reason, error_code)
        self.job_id = job_id
        self.reason = reason
        self.error_code = error_code

    def __str__(self) -> str:
        return f"job {self.job_id!r} is in quarantine: {self.reason} ({self.error_code})"
