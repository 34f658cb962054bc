"""PostgreSQL: a batch of outbox rows is claimed, and marked, in one statement each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Float,
    Integer,
    RowMapping,
    Text,
    any_,
    bindparam,
    case,
    func,
    literal,
    null,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.sql import Select

from celery_outbox.store.clock import after_now
from celery_outbox.store.postgresql.lines import lines
from celery_outbox.store.schema import Tables


def claim_in_one(
    connection: Connection, tables: Tables, *, claim: str, lease: float, limit: int
) -> Sequence[RowMapping]:
    """Claim rows that are due, and read what is needed of their jobs; the oldest first.

    Arguments: see :func:`celery_outbox.store.messages.claim`.
    """
    values = {"claim": claim, "lease": lease, "most": limit}
    return connection.execute(_claim(tables), values).mappings().all()


def mark_in_one(
    connection: Connection,
    tables: Tables,
    attempts: dict[int, int | None],
    claim: str,
    *,
    events: tuple[str, str],
    task_kind: str,
    actor: str,
) -> set[int]:
    """Mark rows as published, and say so in the journal.

    Arguments:
        attempts: the attempt of its job, for each row.
        events: what the journal says of a message of this ``task_kind``, and of another one.

    Returns:
        The rows that were still this claim's.
    """
    # None is named like a column: SQLAlchemy would take it for one that the UPDATE is to set.
    values: dict[str, Any] = {
        "ids": list(attempts),
        "attempts": list(attempts.values()),
        "claim": claim,
    }
    values |= {"of_task": task_kind, "yes": events[0], "no": events[1], "actor": actor}
    return set(connection.execute(_mark(tables), values).scalars())


@lru_cache(maxsize=16)
def _claim(tables: Tables) -> Select[Any]:
    job, message = tables.job, tables.message
    now = after_now(literal(0.0))
    due = (
        select(message.c.id, message.c.due_at)
        .where(message.c.published_at.is_(None), message.c.due_at <= now)
        .order_by(message.c.due_at, message.c.id)
        .limit(bindparam("most", type_=Integer()))
        .with_for_update(skip_locked=True)
        .cte("due")
        .prefix_with("MATERIALIZED", dialect="postgresql")
    )
    claimed = (
        update(message)
        # An array: the rows are found by their key, whatever the planner expects of the table.
        .where(message.c.id == any_(func.array(select(due.c.id).scalar_subquery())))
        .values(
            claimed_by=bindparam("claim", type_=Text()),
            due_at=after_now(bindparam("lease", type_=Float())),
        )
        .returning(message.c.id, message.c.kind, message.c.job_id)
        .cte("claimed")
    )
    return (
        select(
            claimed.c.id,
            claimed.c.kind,
            claimed.c.job_id,
            job.c.task,
            job.c.queue,
            job.c.state,
            job.c.envelope.label("envelope_json"),
            case((job.c.relay == 1, job.c.body), else_=null()).label("body"),
            job.c.relay,
            job.c.attempt,
            job.c.leased_until,
            job.c.expires_at,
            job.c.reason,
            job.c.error_code,
            now.label("now"),
        )
        .join(job, job.c.id == claimed.c.job_id)
        .join(due, due.c.id == claimed.c.id)
        .order_by(due.c.due_at, claimed.c.id)
    )


@lru_cache(maxsize=16)
def _mark(tables: Tables) -> Select[Any]:
    message = tables.message
    now = after_now(literal(0.0))
    ids = bindparam("ids", type_=ARRAY(BigInteger()))
    attempts = bindparam("attempts", type_=ARRAY(Integer()))
    given = func.unnest(ids, attempts).table_valued("id", "attempt", name="given").render_derived()
    marked = (
        update(message)
        .where(
            message.c.id == any_(ids),
            message.c.claimed_by == bindparam("claim", type_=Text()),
            # Not IS NULL, for which the planner may go through all that waits to be published.
            func.num_nulls(message.c.published_at) == 1,
        )
        .values(published_at=now)
        .returning(message.c.id, message.c.job_id, message.c.kind)
        .cte("marked")
    )
    event = case(
        (marked.c.kind == bindparam("of_task", type_=Text()), bindparam("yes", type_=Text())),
        else_=bindparam("no", type_=Text()),
    )
    both = marked.join(given, given.c.id == marked.c.id)
    said = lines(tables, marked.c.job_id, event, None, given.c.attempt, both)
    return select(marked.c.id).add_cte(said)
