"""PostgreSQL: jobs, their messages and their first journal lines in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    Float,
    Integer,
    LargeBinary,
    Text,
    and_,
    bindparam,
    case,
    cast,
    func,
    literal,
    not_,
    select,
)
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.sql import Select

from celery_outbox.core.states import State, Transition
from celery_outbox.store.clock import UTCDateTime, after_now
from celery_outbox.store.messages import TASK
from celery_outbox.store.notification import can_notify, sleep_key
from celery_outbox.store.postgresql.lines import transition_lines
from celery_outbox.store.schema import Tables

if TYPE_CHECKING:
    from celery_outbox.store.recording import NewJob

#: What a call brings, as columns of the job's row and in the order of :func:`_values`.
_COLUMNS: dict[str, Any] = {
    "id": Text(),
    "task": Text(),
    "queue": Text(),
    "envelope": Text(),
    "body": LargeBinary(),
    "relay": Integer(),
    "attempt": Integer(),
    "max_attempts": Integer(),
    "expires_at": UTCDateTime(),
    "result_key": Text(),
    "chord_id": Text(),
    "chord_position": Integer(),
    # Its delay: a time, or seconds from now by the database's clock.
    "moment": UTCDateTime(),
    "wait": Float(),
}


def record_in_one(
    connection: Connection, tables: Tables, calls: Sequence[NewJob], *, actor: str | None
) -> set[str]:
    """Record operations whose ids differ.

    Returns:
        The ids of those that were recorded; there was a job with the id of each of the others.
    """
    columns = zip(*map(_values, calls), strict=True)
    values: dict[str, Any] = dict(zip(_COLUMNS, map(list, columns), strict=True))
    values["actor"] = actor
    values["wakes"] = can_notify(connection) and any(new.available_at is None for new in calls)
    return set(connection.execute(_statement(tables), values).scalars())


def _values(new: NewJob) -> tuple[Any, ...]:
    moment: Any = new.available_at
    wait = 0.0
    if isinstance(moment, timedelta):
        moment, wait = None, moment.total_seconds()
    return (
        new.id,
        new.task,
        new.queue,
        new.envelope_json,
        new.body,
        int(new.relay),
        new.attempt,
        new.max_attempts,
        new.expires_at,
        new.result_key,
        new.chord_id,
        new.chord_position,
        moment,
        wait,
    )


@lru_cache(maxsize=16)
def _statement(tables: Tables) -> Select[Any]:
    """Made once: to make it costs more than to run it."""
    # SQLAlchemy casts a parameter of this type: the values alone need not tell what they are.
    arrays = [bindparam(name, type_=ARRAY(kind)) for name, kind in _COLUMNS.items()]
    call = func.unnest(*arrays).table_valued(*_COLUMNS, name="call").render_derived()
    now = after_now(literal(0.0))
    due_at = func.coalesce(call.c.moment, after_now(call.c.wait))
    given = [name for name in _COLUMNS if name not in ("moment", "wait")]
    recorded = (
        insert(tables.job)
        .from_select(
            [*given, "state", "recorded_at", "available_at"],
            select(*(call.c[name] for name in given), literal(str(State.QUEUED)), now, due_at),
            include_defaults=False,
        )
        .on_conflict_do_nothing()
        .returning(tables.job.c.id, tables.job.c.available_at)
        .cte("recorded")
    )
    message = (
        tables.message.insert()
        .from_select(
            ["job_id", "kind", "created_at", "due_at"],
            select(recorded.c.id, literal(TASK), now, recorded.c.available_at),
            include_defaults=False,
        )
        .cte("message")
    )
    said = transition_lines(tables, recorded, Transition.RECORD, literal(0))
    wakes = bindparam("wakes", type_=Boolean())
    busy = func.pg_try_advisory_xact_lock_shared(literal(sleep_key(tables.channel), BigInteger()))
    notified = cast(func.pg_notify(tables.channel, ""), Text)
    woken = select(case((and_(wakes, not_(busy)), notified))).scalar_subquery()
    return select(recorded.c.id, woken).add_cte(message, said)
