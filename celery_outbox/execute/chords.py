"""Counts the members of chords as they end, and goes on with the body, or with its errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from celery import Celery, states
from celery._state import get_current_worker_task
from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.utils.functional import maybe_list
from kombu.exceptions import EncodeError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.context import of_no_job, reporting, running_job
from celery_outbox.core.chords import ChordState, Part, first_failed, results_of
from celery_outbox.core.states import State
from celery_outbox.execute.callback_id import fix_ids
from celery_outbox.execute.chord_errors import Outer, report, without_id
from celery_outbox.execute.chord_places import (
    Member,
    place_of,
    places_in,
    places_of,
)
from celery_outbox.execute.payload import decode_result, encode_result
from celery_outbox.log import log_event
from celery_outbox.store import chords
from celery_outbox.store.chords import Chord
from celery_outbox.store.database import Database
from celery_outbox.store.patience import patiently

logger = logging.getLogger("celery_outbox.execute")

#: A job in one of these has another end before it, whatever Celery made of this one.
_GOES_ON = frozenset({State.QUEUED, State.RUNNING, State.RETRYING, State.SUCCEEDED})


class Failure(NamedTuple):
    """A chord whose members have all ended, one of them in an error."""

    part: Part
    nested: bool


class Refused(Exception):
    """The body cannot be called with these results."""


class Chords:
    """Synchronizes the chords of one app in the database.

    Arguments:
        app: the Celery app.
        database: the outbox tables.
        use: a block in which calls are recorded through a connection.
        database_timeout: seconds for which an end waits for the database.
    """

    def __init__(
        self,
        app: Celery,
        database: Database,
        *,
        use: Callable[[Connection], AbstractContextManager[None]],
        database_timeout: float,
    ) -> None:
        self.app = app
        self.database = database
        self._use = use
        self._timeout = database_timeout

    def part_returned(self, backend: Any, request: Any, state: str, result: Any) -> bool:
        """Count a member that has ended (``Backend.on_chord_part_return``).

        Arguments:
            request: of the member, or what stands for it: a step of a chain that failed before.
            state: Celery's word for how it ended.
            result: what it returned, or the exception.

        Returns:
            Whether the chord is one of the database; ``False``: the result backend's own.
        """
        if not request.group or not request.id:
            return True
        failed = state in states.PROPAGATE_STATES
        members = places_of(request) if failed else [place_of(request)]
        running = running_job.get()
        ours = True
        for member in members:
            part = self.part_of(backend, member.job_id, result, failed=failed)
            ended = [member.job_id, *([] if running is None else [running.job_id])]
            ours = self.end(backend, member, part, request, ended=ended) and ours
        return ours

    def part_of(self, backend: Any, job_id: str, result: Any, *, failed: bool) -> Part:
        """What a chord keeps of a member."""
        if not failed:
            try:
                return Part(job_id, True, *encode_result(self.app, result))
            except EncodeError as error:
                result = error
        try:
            encoded = encode_result(self.app, backend.prepare_exception(result))
        except EncodeError:
            encoded = encode_result(self.app, backend.prepare_exception(Exception(repr(result))))
        return Part(job_id, False, *encoded)

    def end(
        self, backend: Any, member: Member, part: Part, request: Any, *, ended: Iterable[str]
    ) -> bool:
        """Count one member, and go on where it was the last one.

        Arguments:
            request: of the job that ended; its ``chord`` is the body.
            ended: jobs of which this chord need not expect anything more.

        Returns:
            Whether there is such a chord.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database did not take it in time.
        """
        ids = [*ended]
        try:
            outcome = self._write(lambda c: self._count(c, member, part, request, ids, call=True))
        except Refused as refused:
            log_event(logger, logging.ERROR, "outbox.chord_body_refused", chord=member.chord_id)
            self._write(lambda c: self._count(c, member, part, request, ids, call=False))
            error = ChordError(f"Callback error: {refused.__cause__!r}")
            error.__cause__ = refused.__cause__
            self._fail(backend, member.chord_id, error, request, ids)
            return True
        if isinstance(outcome, Failure):
            error = self._error(backend, outcome)
            self._fail(backend, member.chord_id, error, request, ids)
        return outcome is not None

    def forget(self, chord_id: str, job_id: str) -> None:
        """A chord need not expect anything more of a job."""
        self._write(
            lambda connection: chords.forget_member(
                connection, self.database.tables, chord_id, [job_id]
            )
        )

    def _write(self, work: Callable[[Connection], Any]) -> Any:
        return patiently(lambda: self.database.write(work), timeout=self._timeout, what="chord")

    def _count(
        self,
        connection: Connection,
        member: Member,
        part: Part,
        request: Any,
        ended: list[str],
        *,
        call: bool,
    ) -> Failure | bool | None:
        """Count in a transaction; ``None``: no such chord, ``True``: nothing is left to do."""
        tables = self.database.tables
        chord = chords.lock(connection, tables, member.chord_id)
        if chord is None:
            return None
        if not part.succeeded and chords.state_of(connection, tables, part.job_id) in _GOES_ON:
            return True
        if chord.state is not ChordState.DONE:
            new = chords.count(connection, tables, chord.id, part, member.position)
            counted = chord.counted + new
            failure = self._complete(connection, chord, counted, request, call=call)
            if failure is not None:
                # What is left to do is not done with this transaction.
                return failure
        chords.forget_member(connection, tables, chord.id, ended)
        return True

    def _complete(
        self, connection: Connection, chord: Chord, counted: int, request: Any, *, call: bool
    ) -> Failure | None:
        tables = self.database.tables
        if chord.size is None or counted < chord.size:
            return None
        if counted < chord.size + chords.extra(connection, tables, chord.id):
            return None
        parts = chords.parts(connection, tables, chord.id)
        failed = first_failed(parts)
        if failed is not None:
            if chord.state is ChordState.FAILED:
                return None
            return Failure(failed, chord.structure is not None)
        if call:
            results = [
                (each.job_id, decode_result(each.result, each.result_type)) for each in parts
            ]
            structure = None if chord.structure is None else json.loads(chord.structure)
            self._call(connection, chord, request, results_of(results, structure))
            chords.finish(connection, tables, chord.id, ChordState.DONE)
        return None

    def _call(self, connection: Connection, chord: Chord, request: Any, results: Any) -> None:
        """Record the body in the transaction that counts the last member."""
        try:
            body = self._body(chord.id, chord, request)
            # It is no call of the job that runs here, whose transaction is over.
            with of_no_job(), self._use(connection):
                body.apply_async((results,), **_lineage(request))
        except SQLAlchemyError:
            raise
        except Exception as error:
            raise Refused from error

    def _body(self, chord_id: str, chord: Chord | None, request: Any) -> Any:
        signature = request.chord
        if not signature and chord is not None:
            signature = decode_result(chord.body, chord.body_type)
        body = maybe_signature(signature, app=self.app, clone=True)
        fix_ids(f"{chord_id}|body", body)
        return body

    def _error(self, backend: Any, failure: Failure) -> ChordError:
        part = failure.part
        cause = backend.exception_to_python(decode_result(part.result, part.result_type))
        # The words of Celery's Redis backend.
        text = f"Join error: {cause!r}"
        if not failure.nested:
            text = f"Dependency {part.job_id} raised {cause!r}"
        error = ChordError(text)
        if isinstance(cause, Exception):
            error.__cause__ = cause
        return error

    def _fail(
        self, backend: Any, chord_id: str, error: ChordError, request: Any, ended: list[str]
    ) -> None:
        """Report that a chord has failed, and then note it: a crash between reports it again, and
        error callbacks have fixed ids."""
        chord = self.database.read(lambda c: chords.get(c, self.database.tables, chord_id))
        body = self._body(chord_id, chord, request)
        called = request.called if isinstance(request, Outer) else []
        errbacks = [*maybe_list(body.options.get("link_error") or [])]
        if called:
            # Celery gives the error callbacks of a chord to the chords in its header, too.
            body.options["link_error"] = [
                each for each in errbacks if without_id(each) not in called
            ]
        log_event(logger, logging.ERROR, "outbox.chord_failed", chord=chord_id)
        with reporting(chord_id):
            report(backend, body, error)
        for member in places_in(body):
            # The body was to be a member of another chord.
            part = self.part_of(backend, member.job_id, error, failed=True)
            outer = Outer(body, member, [*called, *map(without_id, errbacks)])
            self.end(backend, member, part, outer, ended=[member.job_id])

        def note(connection: Connection) -> None:
            chords.finish(connection, self.database.tables, chord_id, ChordState.FAILED)
            chords.forget_member(connection, self.database.tables, chord_id, ended)

        self._write(note)


def _lineage(request: Any) -> dict[str, Any]:
    """Root and parent of a body, where Celery does not see the member that is its parent."""
    task = get_current_worker_task()
    if task is not None and task.request.id == request.id:
        return {}
    lineage = {"root_id": request.root_id, "parent_id": request.id}
    return {name: value for name, value in lineage.items() if value}
