"""PostgreSQL: an attempt begins, and succeeds, in one statement each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Float,
    Integer,
    LargeBinary,
    RowMapping,
    Text,
    bindparam,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.sql import Select

from celery_outbox.core.states import State, Transition, sources
from celery_outbox.store.applying import NO_LEASE
from celery_outbox.store.clock import UTCDateTime, after_now
from celery_outbox.store.messages import TASK
from celery_outbox.store.postgresql.lines import transition_lines
from celery_outbox.store.schema import Tables


def claim_in_one(
    connection: Connection,
    tables: Tables,
    job_id: str,
    *,
    task: str,
    nonce: int,
    actor: str,
    lease: float,
) -> RowMapping | None:
    """Take a job that waits for nothing but a worker, as most do.

    Arguments: see :func:`celery_outbox.store.transitions.claim`.

    Returns:
        The row of the job afterwards; ``None``: it needs a closer look.
    """
    values = {"job": job_id, "of": task, "nonce": nonce, "actor": actor, "lease": lease}
    return connection.execute(_claim(tables), values).mappings().first()


def succeed_in_one(
    connection: Connection,
    tables: Tables,
    job_id: str,
    token: int,
    *,
    attempt: int,
    actor: str,
    result: bytes | None,
    result_type: str | None,
) -> bool:
    """See :func:`celery_outbox.store.transitions.succeed`."""
    values: dict[str, Any] = {"job": job_id, "token": token, "number": attempt, "actor": actor}
    values |= {"value": result, "type_of_value": result_type}
    return connection.execute(_succeed(tables), values).first() is not None


@lru_cache(maxsize=16)
def _claim(tables: Tables) -> Select[Any]:
    job = tables.job
    column, now = job.c, after_now(literal(0.0))
    taken = (
        update(job)
        .where(
            column.id == bindparam("job", type_=Text()),
            column.task == bindparam("of", type_=Text()),
            # What core.decisions.decide would have run at once.
            column.state.in_([str(State.QUEUED), str(State.RETRYING)]),
            column.available_at <= now,
            or_(column.expires_at.is_(None), column.expires_at > now),
            column.relay == 0,
        )
        .values(
            state=str(State.RUNNING),
            attempt=column.attempt + 1,
            deliveries=column.deliveries + 1,
            lease_token=column.lease_token + 1,
            lease_nonce=bindparam("nonce", type_=BigInteger()),
            leased_by=bindparam("actor", type_=Text()),
            leased_until=after_now(bindparam("lease", type_=Float())),
            started_at=now,
        )
        .returning(*column)
        .cte("taken")
    )
    # When its message was published is nothing that a worker asks for.
    unknown = literal(None, UTCDateTime()).label("published_at")
    # For this transaction. What a crash of the server takes away is the last of what was written:
    # this claim, and with it all that came after it. A worker that then has an end to write finds
    # that nobody holds the job, and hands the message back (Hold._lose).
    does_not_wait = func.set_config("synchronous_commit", "off", True) == "off"
    return (
        select(*taken.c, unknown, now.label("now"))
        .where(does_not_wait)
        .add_cte(transition_lines(tables, taken, Transition.CLAIM, taken.c.attempt))
    )


@lru_cache(maxsize=16)
def _succeed(tables: Tables) -> Select[Any]:
    job, message = tables.job, tables.message
    column, now = job.c, after_now(literal(0.0))
    ended = (
        update(job)
        .where(
            column.id == bindparam("job", type_=Text()),
            column.state.in_(sorted(str(state) for state in sources(Transition.SUCCEED))),
            column.lease_token == bindparam("token", type_=BigInteger()),
        )
        .values(
            **NO_LEASE,
            state=str(State.SUCCEEDED),
            result=bindparam("value", type_=LargeBinary()),
            result_type=bindparam("type_of_value", type_=Text()),
            error_code=None,
            error_detail=None,
            finished_at=now,
            # What only begins a chain hands over to the next step.
            chord_id=case((column.chord_position.is_not(None), column.chord_id), else_=null()),
        )
        .returning(column.id)
        .cte("ended")
    )
    dropped = (
        delete(message)
        .where(
            message.c.job_id == ended.c.id,
            message.c.kind == TASK,
            message.c.published_at.is_(None),
            message.c.claimed_by.is_(None),
        )
        .cte("dropped")
    )
    number = bindparam("number", type_=Integer())
    said = transition_lines(tables, ended, Transition.SUCCEED, number)
    return select(ended.c.id).add_cte(dropped, said)
