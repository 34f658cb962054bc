"""Records chords: what a header is, in the transaction in which its members are recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from celery._state import get_current_worker_task
from celery.result import GroupResult
from celery.utils.functional import _regen
from kombu.exceptions import EncodeError
from kombu.serialization import dumps
from sqlalchemy import Connection

from celery_outbox.core.chords import LAST
from celery_outbox.record.alone import Alone
from celery_outbox.record.batch import Batches
from celery_outbox.record.binding import connection_of
from celery_outbox.store import chords
from celery_outbox.store.database import Database


class ChordRecorder:
    """What Celery asks of a result backend when a chord is called, kept in the database.

    Arguments:
        app: the Celery app.
        database: the outbox tables.
        owners: says whose transaction a call belongs to.
        alone: transactions for what comes with none.
        batches: the blocks that a call with none belongs to.
    """

    def __init__(
        self,
        app: Celery,
        database: Database,
        *,
        owners: Callable[[], Sequence[Any]],
        alone: Alone,
        batches: Batches,
    ) -> None:
        self._app = app
        self._database = database
        self._owners = owners
        self._alone = alone
        self._batches = batches

    def begin(self, header: Sequence[Any], body: Any) -> None:
        """Note a chord whose header is recorded next (``Backend.apply_chord``).

        Arguments:
            header: the id of the header's group, and its results.
            body: the body's signature.
        """
        chord_id, results = header[0], header[1]
        structure = None
        # A header that comes from a generator is not unrolled here.
        if not isinstance(results, _regen) and any(
            isinstance(each, GroupResult) for each in results
        ):
            structure = json.dumps(_ids(results))
        data, content_type = self._encode(body)
        self._write(
            lambda connection: chords.create(
                connection,
                self._database.tables,
                chord_id,
                structure=structure,
                body=data,
                body_type=content_type,
            )
        )

    def set_size(self, chord_id: str, size: int) -> None:
        """Say how many members the header has; Celery knows it when it sends the last one."""
        self._write(
            lambda connection: chords.set_size(connection, self._database.tables, chord_id, size)
        )

    def add(self, chord_id: str, job_id: str) -> None:
        """Add a member to the chord of the running task, at the place of that task."""
        task = get_current_worker_task()
        position = None if task is None else task.request.group_index
        self._write(
            lambda connection: chords.expect(
                connection,
                self._database.tables,
                chord_id,
                job_id,
                LAST if position is None else position,
                extra=True,
            )
        )

    def _encode(self, body: Any) -> tuple[bytes | None, str | None]:
        for serializer in (self._app.conf.task_serializer, "pickle"):
            try:
                content_type, encoding, data = dumps(dict(body), serializer=serializer)
            except EncodeError:
                continue
            raw = data.encode("utf-8") if isinstance(data, str) else data
            return raw, f"{content_type}; charset={encoding}"
        return None, None

    def _write(self, work: Callable[[Connection], None]) -> None:
        for owner in self._owners():
            connection = connection_of(owner, self._database.tables, "celery.chord")
            if connection is not None:
                self._database.ensure_ready(connection)
                work(connection)
                return
        self._alone.check_allowed("celery.chord")
        batch = self._batches.here()
        if batch is not None:
            batch.add(work)
        else:
            self._alone.write(work)


def chord_of(
    headers: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str | None, int | None]:
    """Which chord waits for a call, and where in its header the call stands.

    Arguments:
        headers: of the call's message.
        options: what the call was made with.

    Returns:
        The chord's id and the position; no position: the chord waits for the end of the chain
        that the call begins. ``None`` and ``None``: no chord waits.
    """
    if options.get("chord") and headers.get("group"):
        index = headers.get("group_index")
        return headers["group"], LAST if index is None else int(index)
    for step in options.get("chain") or ():
        found = _chord_in(step)
        if found is not None:
            return found, None
    return None, None


def _chord_in(signature: Any) -> str | None:
    """The id of the chord that a step of a chain is a member of."""
    if not isinstance(signature, Mapping):
        return None
    options = signature.get("options") or {}
    if options.get("chord") and options.get("group_id"):
        found: str = options["group_id"]
        return found
    body = (signature.get("kwargs") or {}).get("body")
    return _chord_in(body) if signature.get("subtask_type") == "chord" else None


def _ids(results: Sequence[Any]) -> list[Any]:
    return [_ids(each.results) if isinstance(each, GroupResult) else each.id for each in results]
