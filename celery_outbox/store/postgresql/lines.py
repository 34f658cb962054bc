"""PostgreSQL: journal lines that are part of the statement that they are about."""

from __future__ import annotations

from typing import Any

from sqlalchemy import CTE, ColumnElement, Text, bindparam, literal, null, select

from celery_outbox.core.states import Transition, target
from celery_outbox.store.clock import after_now
from celery_outbox.store.schema import Tables


def transition_lines(
    tables: Tables, changed: CTE, transition: Transition, attempt: ColumnElement[Any]
) -> CTE:
    """One line for each job that a statement has changed.

    The parameter ``actor`` says who did it.

    Arguments:
        changed: what the statement returns of them; ``id`` among it.
        attempt: the number of the attempt.
    """
    state = literal(str(target(transition)))
    return lines(tables, changed.c.id, literal(str(transition)), state, attempt, changed)


def lines(
    tables: Tables,
    job_id: ColumnElement[Any],
    event: ColumnElement[Any],
    state: ColumnElement[Any] | None,
    attempt: ColumnElement[Any],
    source: Any,
) -> CTE:
    """One line for each row of a part of a statement.

    The parameter ``actor`` says who did it.

    Arguments:
        source: that part, or a join with it.
    """
    columns = {
        "job_id": job_id,
        "at": after_now(literal(0.0)),
        "event": event,
        "state": null() if state is None else state,
        "attempt": attempt,
        "actor": bindparam("actor", type_=Text()),
    }
    rows = select(*columns.values()).select_from(source)
    insert = tables.event.insert().from_select(list(columns), rows, include_defaults=False)
    return insert.cte("lines")
