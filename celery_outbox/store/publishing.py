"""What a dispatcher writes down after it has sent a batch."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection

from celery_outbox.core.reasons import Reason
from celery_outbox.store import journal, messages, quarantining, relaying, transitions
from celery_outbox.store.messages import Message
from celery_outbox.store.postgresql.publishing import mark_in_one
from celery_outbox.store.schema import Tables

#: What the journal says of a message that the broker has confirmed, and of a copy for the
#: quarantine queue.
PUBLISHED, COPIED = "published", "copied"


def mark(
    connection: Connection,
    tables: Tables,
    confirmed: Sequence[Message],
    claim: str,
    *,
    actor: str,
) -> set[int]:
    """Mark confirmed messages as published; a job of another service ends with that.

    Returns:
        The rows that were still this claim's.
    """
    # Jobs before messages: the order in which every transition locks them.
    for message in confirmed:
        if message.relay and message.kind == messages.TASK:
            relaying.relay(connection, tables, message.job_id, attempt=message.attempt, actor=actor)
    if connection.dialect.name == "postgresql":
        return mark_in_one(
            connection,
            tables,
            {message.id: message.attempt for message in confirmed},
            claim,
            events=(PUBLISHED, COPIED),
            task_kind=messages.TASK,
            actor=actor,
        )
    marked = messages.mark_published(
        connection, tables, [message.id for message in confirmed], claim
    )
    lines = [
        journal.line(
            message.job_id,
            PUBLISHED if message.kind == messages.TASK else COPIED,
            attempt=message.attempt,
            actor=actor,
        )
        for message in confirmed
        if message.id in marked
    ]
    journal.write(connection, tables, lines)
    return marked


def refuse(
    connection: Connection,
    tables: Tables,
    message: Message,
    reason: Reason,
    claim: str,
    *,
    actor: str,
) -> bool:
    """Quarantine the job of a message that the broker will not take.

    Returns:
        Whether it took effect; ``False``: the job does not wait for this message.
    """
    took = quarantining.quarantine_waiting(
        connection,
        tables,
        message.job_id,
        attempt=message.attempt,
        actor=actor,
        reason=reason,
        error_code=str(reason),
        copy=True,
    )
    messages.drop(connection, tables, [message.id], claim)
    return took


def expire(
    connection: Connection, tables: Tables, message: Message, claim: str, *, actor: str
) -> None:
    """End the job of a message whose time is over before it was published."""
    transitions.expire(connection, tables, message.job_id, attempt=message.attempt, actor=actor)
    messages.drop(connection, tables, [message.id], claim)
