"""Records one call: from Celery's message to rows in the caller's transaction."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, cast

from celery import Celery, Task
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601
from kombu.exceptions import EncodeError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, MissingGreenlet
from sqlalchemy.orm import Session

from celery_outbox.context import running_job
from celery_outbox.core.result_key import fill_result_key
from celery_outbox.exceptions import (
    ConfigurationError,
    InvalidDelay,
    InvalidJobId,
    NameTooLong,
    PayloadTooLarge,
    UnusableSession,
)
from celery_outbox.record.alone import Alone
from celery_outbox.record.batch import Batches
from celery_outbox.record.binding import (
    RUN_SYNC,
    Place,
    connection_now,
    connection_of,
    place_of,
)
from celery_outbox.record.capture import RecordingProducer
from celery_outbox.record.child import derived_id
from celery_outbox.record.chords import chord_of
from celery_outbox.record.payload import explain
from celery_outbox.record.waiting import Waiting
from celery_outbox.store.absorbing import absorb
from celery_outbox.store.buffer import can_wait
from celery_outbox.store.calls import Call
from celery_outbox.store.database import Database
from celery_outbox.store.dialects import check_room
from celery_outbox.store.engine import is_autocommit
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.recording import NewJob, record
from celery_outbox.store.schema import MAX_JOB_ID, MAX_NAME

#: What stands for arguments wherever Celery would show them (logs, events, Flower).
REDACTED = "(...)"

#: An id as Celery makes them (``celery.utils.uuid``), for a signature too before it is called.
_RANDOM_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Recorder:
    """Records the calls of one app.

    Arguments:
        app: the Celery app.
        database: the outbox tables.
        alone: transactions for calls that come with none.
        batches: the groups that calls with none belong to.
        max_payload_size: largest serialized payload, in bytes.
    """

    def __init__(
        self,
        app: Celery,
        database: Database,
        *,
        alone: Alone,
        batches: Batches,
        max_payload_size: int,
    ) -> None:
        self._app = app
        self._database = database
        self._alone = alone
        self._batches = batches
        self._max_payload_size = max_payload_size
        self._actor = f"{socket.gethostname()}:{os.getpid()}"
        self._waiting = Waiting(database.tables, database.buffers)

    def record_call(
        self,
        task: Task,
        celery_apply_async: Callable[..., AsyncResult],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        task_id: str | None,
        owners: Sequence[Any],
        max_attempts: int,
        result_key_template: str | None,
        options: dict[str, Any],
        relay: bool = False,
    ) -> AsyncResult:
        """Record ``task.apply_async(args, kwargs, **options)``.

        Arguments:
            task: the task, or what stands for one that is not registered here.
            celery_apply_async: Celery's own ``apply_async`` of the task.
            task_id: the caller's stable key, or ``None``.
            owners: sessions or connections, the first that is not ``None`` wins.
            max_attempts: attempts of the job in all.
            relay: the task is another service's, and its message goes out in full.

        Returns:
            A result whose id is the job id; when there is a job with this id, that job's.

        Raises:
            RecordError: the call cannot be recorded; nothing was written.
        """
        if task_id is not None:
            check_job_id(task_id, task.name)
        if len(task.name) > MAX_NAME:
            raise NameTooLong(task=task.name[:60] + "...", what="name", limit=MAX_NAME)
        ignore_result = options.pop("ignore_result", task.ignore_result)
        # The delay belongs to the database. Celery does not get to see it: it would reroute
        # the message of a quorum queue through its exchanges for delayed delivery.
        available_at = due(task.name, options.pop("countdown", None), options.pop("eta", None))
        # Checked before Celery reads it, which would raise an error of its parser.
        expires = options.get("expires")
        if isinstance(expires, (str, datetime)):
            due(task.name, None, expires, option="expires")
        # Celery would make a producer of it and send the message.
        options.pop("connection", None)
        producer = RecordingProducer()
        running = running_job.get()
        stable = task_id is not None and _RANDOM_ID.fullmatch(task_id) is None
        if task_id is None and running is not None:
            task_id = derived_id(self._app, running, task, args, kwargs, options)
        redacted = [name for name in ("argsrepr", "kwargsrepr") if options.get(name) is None]
        options.update(dict.fromkeys(redacted, REDACTED))
        try:
            result = celery_apply_async(
                args,
                kwargs,
                task_id=task_id,
                producer=producer,
                # Celery prepares the result backend for an answer unless the result is
                # ignored, which would open a connection. The true value is put back below.
                ignore_result=True,
                **options,
            )
        except EncodeError as error:
            serializer = options.get("serializer") or task.serializer
            raise explain(task.name, serializer, args, kwargs) from error
        result.ignored = ignore_result
        envelope, body = producer.captured(self._app.amqp.queues)
        for name in redacted:
            # Celery takes an option that is given for a property of the message, too.
            envelope.properties.pop(name, None)
        if "id" not in envelope.headers:
            raise ConfigurationError(
                setting="task_protocol",
                problem="celery-outbox needs message protocol 2",
                remedy="Remove the setting, 2 is its default.",
            )
        envelope.headers["ignore_result"] = ignore_result
        if len(envelope.queue or "") > MAX_NAME:
            raise NameTooLong(task=task.name, what="queue's name", limit=MAX_NAME)
        if len(body) > self._max_payload_size:
            raise PayloadTooLarge(task=task.name, size=len(body), limit=self._max_payload_size)
        job_id = envelope.headers["id"]
        try:
            text = envelope.to_json()
        except (TypeError, ValueError) as error:
            raise explain(task.name, "json", None, None) from error
        chord_id, position = chord_of(envelope.headers, options)
        new = NewJob(
            id=job_id,
            task=envelope.headers["task"],
            queue=envelope.queue,
            envelope=envelope,
            envelope_json=text,
            body=body,
            max_attempts=max_attempts,
            # A receiver of before_task_publish may have delayed it.
            available_at=due(task.name, None, envelope.headers.get("eta")) or available_at,
            expires_at=_expires_at(envelope),
            result_key=fill_result_key(task.name, result_key_template, job_id, args, kwargs),
            relay=relay,
            chord_id=chord_id,
            chord_position=position,
        )
        if running is not None and running.job_id == job_id:
            running.resume_as(new)
        else:
            self._write(new, owners, task.name, stable)
        return result

    def write(self, owner: Any) -> None:
        """Write what was recorded in the transaction of ``owner`` and waits to be written.

        Raises:
            UnusableSession: ``owner`` is no session, or cannot ask its database here.
            NotWritten, JobIdTaken, sqlalchemy.exc.DBAPIError: it cannot be written.
        """
        connection = connection_of(owner, self._database.tables, "(any)")
        if connection is not None:
            self._database.buffers.write(connection)

    def _write(self, new: NewJob, owners: Sequence[Any], task: str, stable: bool) -> None:
        for owner in owners:
            place = place_of(owner, task)
            if place is not None:
                self._record_in(place, new, task, stable)
                return
        self._alone.check_allowed(task)
        batch = self._batches.here()
        if batch is not None:
            batch.add(Call.of(new, self._actor))
        elif not self._alone.write_in_one(partial(self._record, new)):
            self._alone.write(partial(self._absorb, new))

    def _record_in(self, place: Place, new: NewJob, task: str, stable: bool) -> None:
        connection = connection_now(place, self._database.tables, task)
        if connection is None:
            session = cast("Session", place)
            self._waiting.add(session, Call.of(new, self._actor))
            _note(new, session.get_transaction())
        elif not can_wait(connection):
            self._keep_in_coroutine(connection, new)
        elif stable or is_autocommit(connection):
            # An id of the caller's own is looked up at the call, behind the calls before it.
            self._database.buffers.write(connection)
            self._insert(connection, new)
            if not is_autocommit(connection):
                _note(new, connection.get_transaction())
        else:
            self._database.ensure_ready(connection)
            check_room(connection, new.envelope_json, new.body)
            self._keep(connection, new)

    def _keep_in_coroutine(self, connection: Connection, new: NewJob) -> None:
        cause: Exception | None = None
        problem = "its connections are in autocommit"
        try:
            if not is_autocommit(connection):
                self._keep(connection, new)
                return
        except (MissingGreenlet, DBAPIError) as error:
            if not isinstance(getattr(error, "orig", error), MissingGreenlet):
                raise
            cause, problem = error, "its transaction does not begin without asking the database"
        raise UnusableSession(
            task=new.task, kind=type(connection).__name__, remedy=f"{problem}; {RUN_SYNC}"
        ) from cause

    def _keep(self, connection: Connection, new: NewJob) -> None:
        self._database.buffers.add(connection, Call.of(new, self._actor))
        _note(new, connection.get_transaction())

    def _insert(self, connection: Connection, new: NewJob) -> None:
        self._database.ensure_ready(connection)
        if not self._record(new, connection):
            self._absorb(new, connection)

    def _record(self, new: NewJob, connection: Connection) -> bool:
        return record(connection, self._database.tables, new, actor=self._actor)

    def _absorb(self, new: NewJob, connection: Connection) -> None:
        absorb(connection, self._database.tables, new, actor=self._actor)


def _note(new: NewJob, transaction: Any) -> None:
    """Tell the attempt that makes the call in whose transaction it is."""
    running = running_job.get()
    if running is not None:
        running.note_call(new.task, transaction)


def check_job_id(job_id: Any, task: str) -> None:
    """Check a caller's job id.

    Raises:
        InvalidJobId: it is empty, too long, holds NUL, or is not text.
    """
    if not isinstance(job_id, str):
        problem = f"it is a {type(job_id).__name__}, not a str"
    elif not job_id:
        problem = "it is empty"
    elif len(job_id) > MAX_JOB_ID:
        problem = f"it has {len(job_id)} characters"
        job_id = job_id[:40] + "..."
    elif "\x00" in job_id:
        problem = "it holds NUL"
    elif not job_id.isprintable():
        problem = "it holds characters that cannot be printed"
    else:
        return
    raise InvalidJobId(job_id=job_id, task=task, problem=problem)


def due(task: str, countdown: Any, eta: Any, option: str = "eta") -> datetime | timedelta | None:
    """When a call is due: a time in UTC, or how long from now; ``None``: now.

    Arguments:
        countdown: seconds from now, by the database's clock: the caller's may be wrong. It wins
            over ``eta``, as in Celery.
        eta: a datetime or ISO 8601 text; without a time zone it is in UTC, as
            Celery's workers read it.
        option: what ``eta`` is called in the error.

    Raises:
        InvalidDelay: it is not a time.
    """
    option, value = ("countdown", countdown) if countdown else (option, eta)
    if not value:
        return None
    try:
        if option == "countdown":
            delay = timedelta(seconds=value)
            # Checked here: the database would refuse a time that no calendar has.
            _ = datetime.now(timezone.utc) + delay
            return delay
        return _moment(value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidDelay(task=task, option=option, value=value, problem=str(error)) from error


def _expires_at(envelope: Envelope) -> datetime | None:
    """When the message is of no use any more: the header says it, or the time to live alone."""
    expires = envelope.headers.get("expires")
    milliseconds = envelope.properties.get("expiration")
    if expires is None and milliseconds is not None:
        return datetime.now(timezone.utc) + timedelta(milliseconds=int(milliseconds))
    return _moment(expires)


def _moment(value: datetime | str | None) -> datetime | None:
    """An absolute time in UTC; Celery's headers have it as ISO 8601."""
    if value is None:
        return None
    moment: datetime = maybe_iso8601(value)
    if moment.tzinfo is None:
        # Celery's worker reads a naive time as UTC (celery.utils.time.maybe_make_aware).
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc)
