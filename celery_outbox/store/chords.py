"""Chords: how many members a header has, which of them have ended, and with what.

Who counts holds the chord's row, so two last members do not both complete it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Select, delete, func, or_, select, update

from celery_outbox.core.chords import ChordState, Part
from celery_outbox.core.states import State
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.dialects import insert_if_absent, random_order
from celery_outbox.store.schema import Tables

_SUCCEEDED = "succeeded"
_FAILED = "failed"


@dataclass(frozen=True)
class Chord:
    """One row of ``outbox_chord``."""

    id: str
    state: ChordState
    size: int | None
    counted: int
    structure: str | None
    body: bytes | None = field(repr=False)
    body_type: str | None


def create(
    connection: Connection,
    tables: Tables,
    chord_id: str,
    *,
    structure: str | None,
    body: bytes | None,
    body_type: str | None,
) -> None:
    """Note a chord whose header is about to be recorded; what is there already stays.

    Arguments:
        structure: JSON of the ids of the header's results, if groups are nested in it.
        body: the body's signature, and how it is encoded.
    """
    values = {"id": chord_id, "structure": structure, "body": body, "body_type": body_type}
    insert_if_absent(connection, tables.chord, values)


def set_size(connection: Connection, tables: Tables, chord_id: str, size: int) -> None:
    """Say how many members a header has; what was said of a chord that has ended stays.

    The largest number counts: Celery 5.4 says it again, by the chord's id, of a group at the end
    of a chain in the header, whose members the header has counted.
    """
    chord = tables.chord
    if not insert_if_absent(connection, chord, {"id": chord_id, "size": size}):
        smaller = or_(chord.c.size.is_(None), chord.c.size < size)
        connection.execute(
            update(chord)
            .where(chord.c.id == chord_id, chord.c.state == str(ChordState.OPEN), smaller)
            .values(size=size)
        )


def expect(
    connection: Connection,
    tables: Tables,
    chord_id: str,
    job_id: str,
    position: int,
    *,
    extra: bool = False,
) -> None:
    """Name a member that will be counted whichever chord its job was recorded for.

    Arguments:
        extra: it comes on top of the header's size.
    """
    values = {
        "chord_id": chord_id,
        "job_id": job_id,
        "position": position,
        "extra": int(extra),
    }
    insert_if_absent(connection, tables.chord_part, values)


def lock(connection: Connection, tables: Tables, chord_id: str) -> Chord | None:
    """The chord with this id, locked until the transaction ends, or ``None``."""
    return _one(connection, _select(tables, chord_id).with_for_update())


def get(connection: Connection, tables: Tables, chord_id: str) -> Chord | None:
    """The chord with this id, or ``None``."""
    return _one(connection, _select(tables, chord_id))


def count(connection: Connection, tables: Tables, chord_id: str, part: Part, position: int) -> int:
    """Count a member of a locked chord that has ended; once, however often it is called.

    A success takes the place of a failure, so that a member that was replayed counts.

    Returns:
        For how many members it stands that were not counted before.
    """
    table = tables.chord_part
    ended = {
        "state": _SUCCEEDED if part.succeeded else _FAILED,
        "result": part.result,
        "result_type": part.result_type,
    }
    key = {"chord_id": chord_id, "job_id": part.job_id, "position": position}
    new = int(insert_if_absent(connection, table, {**key, **ended}))
    same = (table.c.chord_id == chord_id) & (table.c.job_id == part.job_id)
    # The same id may stand in the header twice, and was recorded once.
    expected = update(table).where(same, table.c.state.is_(None)).values(**ended)
    new += connection.execute(expected).rowcount
    if new:
        chord = tables.chord
        connection.execute(
            update(chord).where(chord.c.id == chord_id).values(counted=chord.c.counted + new)
        )
    elif part.succeeded:
        connection.execute(update(table).where(same, table.c.state == _FAILED).values(**ended))
    return new


def extra(connection: Connection, tables: Tables, chord_id: str) -> int:
    """How many members were added to a header whose size was fixed."""
    part = tables.chord_part
    statement = select(func.count()).where(part.c.chord_id == chord_id, part.c.extra == 1)
    return int(connection.execute(statement).scalar_one())


def parts(connection: Connection, tables: Tables, chord_id: str) -> list[Part]:
    """The members that have ended, by position."""
    part = tables.chord_part
    statement = (
        select(part.c.job_id, part.c.state, part.c.result, part.c.result_type)
        .where(part.c.chord_id == chord_id, part.c.state.is_not(None))
        .order_by(part.c.position, part.c.job_id)
    )
    return [
        Part(row.job_id, row.state == _SUCCEEDED, row.result, row.result_type)
        for row in connection.execute(statement)
    ]


def has_counted(
    connection: Connection, tables: Tables, chord_id: str, job_ids: Collection[str]
) -> bool:
    """Whether all of these members were counted, or the chord is done or failed."""
    chord, part = tables.chord, tables.chord_part
    state = connection.execute(select(chord.c.state).where(chord.c.id == chord_id)).scalar()
    if state is not None and state != str(ChordState.OPEN):
        return True
    statement = select(func.count(func.distinct(part.c.job_id))).where(
        part.c.chord_id == chord_id, part.c.job_id.in_(job_ids), part.c.state.is_not(None)
    )
    return int(connection.execute(statement).scalar_one()) == len(set(job_ids))


def finish(connection: Connection, tables: Tables, chord_id: str, state: ChordState) -> None:
    """End a chord; the results of one that is done are its body's arguments now."""
    chord, part = tables.chord, tables.chord_part
    connection.execute(
        update(chord)
        .where(chord.c.id == chord_id, chord.c.state != str(ChordState.DONE))
        .values(state=str(state), finished_at=db_now())
    )
    if state is ChordState.DONE:
        connection.execute(delete(part).where(part.c.chord_id == chord_id))


def forget_member(
    connection: Connection, tables: Tables, chord_id: str, job_ids: Collection[str]
) -> None:
    """Nothing is left to be counted of these jobs, and nothing is expected of them any more."""
    job, part = tables.job, tables.chord_part
    connection.execute(
        update(job).where(job.c.id.in_(job_ids), job.c.chord_id == chord_id).values(chord_id=None)
    )
    connection.execute(
        delete(part).where(
            part.c.chord_id == chord_id, part.c.job_id.in_(job_ids), part.c.state.is_(None)
        )
    )


def state_of(connection: Connection, tables: Tables, job_id: str) -> State | None:
    """The state of a job, or ``None``: there is no such job."""
    found = connection.execute(select(tables.job.c.state).where(tables.job.c.id == job_id)).scalar()
    return None if found is None else State(found)


def uncounted(
    connection: Connection, tables: Tables, *, after: float, limit: int
) -> list[tuple[str, str, int | None]]:
    """Jobs that ended ``after`` seconds ago and that a chord still waits for.

    In no order: those that cannot be counted, however often, do not hide the others.

    Returns:
        The ids of chord and job, and where in the header the job was expected; ``None``: its own
        message says so.
    """
    job, part = tables.job, tables.chord_part
    own = (
        select(job.c.chord_id, job.c.id)
        .where(job.c.chord_id.is_not(None), job.c.finished_at <= db_after(-after))
        .order_by(random_order(connection.dialect))
        .limit(limit)
    )
    found: list[tuple[str, str, int | None]] = [
        (row.chord_id, row.id, None) for row in connection.execute(own)
    ]
    expected = (
        select(part.c.chord_id, part.c.job_id, part.c.position)
        .join(job, job.c.id == part.c.job_id)
        .where(part.c.state.is_(None), job.c.finished_at <= db_after(-after))
        .order_by(random_order(connection.dialect))
        .limit(limit)
    )
    found += [(row.chord_id, row.job_id, row.position) for row in connection.execute(expected)]
    return found


def _select(tables: Tables, chord_id: str) -> Select[Any]:
    chord = tables.chord
    columns = [chord.c[name] for name in Chord.__dataclass_fields__]
    return select(*columns).where(chord.c.id == chord_id)


def _one(connection: Connection, statement: Select[Any]) -> Chord | None:
    row = connection.execute(statement).mappings().first()
    return None if row is None else Chord(**{**row, "state": ChordState(row["state"])})
