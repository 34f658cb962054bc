"""What every publisher answers, whatever the broker."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from celery import Celery
from kombu import Exchange, Queue

from celery_outbox.dispatch.wire import Wire
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.dispatch")


class Outcome(str, Enum):
    """What became of one message."""

    #: The broker has taken responsibility for it.
    CONFIRMED = "confirmed"
    #: No queue is there for it.
    UNROUTABLE = "unroutable"
    #: The broker refused it this time (a full queue, an internal error).
    NACKED = "nacked"
    #: The broker takes no message of this size.
    TOO_LARGE = "too_large"
    #: It cannot be sent, now or later.
    UNPUBLISHABLE = "unpublishable"


@dataclass
class Report:
    """What became of a batch.

    Attributes:
        outcomes: by outbox row; a row that is missing here is undecided and stays due.
        outage: why the batch was broken off; the rows are not to blame.
    """

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    outage: BaseException | None = None

    def decide(self, wire: Wire, outcome: Outcome) -> None:
        """Note what the broker, or the attempt to send it, has said about a message."""
        self.outcomes[wire.id] = outcome

    def cannot_send(self, wire: Wire, error: Exception) -> None:
        """Note that a message is such that nobody can send it."""
        log_event(
            logger,
            logging.WARNING,
            "outbox.unpublishable",
            message=wire.id,
            error=type(error).__name__,
        )
        self.decide(wire, Outcome.UNPUBLISHABLE)


class Publisher(Protocol):
    """Sends messages and finds out what became of each."""

    def publish(self, wires: Sequence[Wire]) -> Report:
        """Send a batch; waits, within the publish timeout, until the broker has answered."""

    def close(self) -> None:
        """Let go of the broker."""


def to_declare(app: Celery, wire: Wire, declared: Collection[str]) -> list[Queue | Exchange]:
    """What must exist before a message is sent, as with Celery's own publish.

    Arguments:
        app: knows the configured queues, and makes up the others as Celery does.
        declared: what this connection has declared already, by :func:`key_of`.
    """
    entities = list(wire.declare)
    if wire.queue is not None and wire.queue not in {
        entity.name for entity in entities if isinstance(entity, Queue)
    }:
        # task_create_missing_queues may be off: then it is a queue of somebody else's, or none at
        # all, and the broker will say so.
        with suppress(KeyError):
            entities.append(app.amqp.queues[wire.queue])
    return [entity for entity in entities if key_of(entity) not in declared]


def key_of(entity: Queue | Exchange) -> str:
    """What an entity is remembered by once it is declared: a queue and an exchange may have the
    same name."""
    return str(entity.name) if isinstance(entity, Queue) else f"exchange {entity.name}"
