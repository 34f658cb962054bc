"""How every transition is written: the state of an existing job, and the line in the journal."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, update

from celery_outbox.core.states import State, Transition, sources, target
from celery_outbox.store import journal
from celery_outbox.store.schema import Tables

#: The values of a job that no worker holds.
NO_LEASE: dict[str, Any] = {"leased_by": None, "leased_until": None}

#: The values of a job that had ended and goes on.
NOT_FINAL: dict[str, Any] = {
    "finished_at": None,
    "reason": None,
    "source": None,
    "report_at": None,
}


def apply(
    connection: Connection,
    tables: Tables,
    transition: Transition,
    job_id: str,
    conditions: list[ColumnElement[bool]],
    **values: Any,
) -> bool:
    """Make a transition, from the states from which the table permits it.

    Arguments:
        conditions: what else must hold, the attempt's lease token for example.
        values: the columns that change with the state.

    Returns:
        Whether it took effect.
    """
    column = tables.job.c
    statement = (
        update(tables.job)
        .where(
            column.id == job_id,
            column.state.in_(sorted(str(state) for state in sources(transition))),
            *conditions,
        )
        .values(state=str(target(transition)), **values)
    )
    return bool(connection.execute(statement).rowcount == 1)


def note(
    connection: Connection,
    tables: Tables,
    event: Transition | str,
    job_id: str,
    attempt: int,
    actor: str | None,
    *,
    state: State | None = None,
    reason: str | None = None,
    error_code: str | None = None,
) -> None:
    """Write one line into the journal.

    Arguments:
        event: the transition that took effect, or the name of what changed no state.
        state: the job's state after an event that is no transition.
    """
    after = target(event) if isinstance(event, Transition) else state
    line = journal.line(
        job_id,
        event,
        state=after,
        attempt=attempt,
        actor=actor,
        reason=reason,
        error_code=error_code,
    )
    journal.write(connection, tables, [line])
