"""A broker that will not wait for an acknowledgement any longer: it closes the channel.

RabbitMQ does so when a delivery has not been acknowledged for half an hour (``consumer_timeout``;
RabbitMQ documentation, "Delivery Acknowledgement Timeout"). Celery takes that for an error that
will not pass, and its worker ends, with all that runs in it. Here it is a lost connection: the
worker connects again, and the guard answers what is delivered again.
"""

from __future__ import annotations

import logging
from typing import Any

from amqp.exceptions import PreconditionFailed, RecoverableConnectionError
from kombu import Connection

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.execute")


def outlive_overdue_acks(connection: Connection) -> None:
    """Make a connection fail as a whole when the broker has waited too long on a channel.

    Arguments:
        connection: an established one; a new one has to be given again.
    """
    handle = getattr(connection.connection, "on_inbound_frame", None)
    if handle is None:
        # Not AMQP.
        return

    def on_frame(frame: Any) -> Any:
        try:
            return handle(frame)
        except PreconditionFailed as error:
            if not is_overdue_ack(error):
                raise
            log_event(logger, logging.WARNING, "outbox.ack_overdue")
            raise RecoverableConnectionError(str(error.reply_text)) from error

    connection.connection.on_inbound_frame = on_frame


def is_overdue_ack(error: PreconditionFailed) -> bool:
    """Whether the broker closed a channel for an acknowledgement that took too long.

    It has no code of its own, only RabbitMQ's text: "consumer ack timed out on channel 1" (3.8),
    "delivery acknowledgement on channel 1 timed out" (since then).
    """
    text = str(error.reply_text or "").lower()
    return "timed out" in text and ("consumer ack" in text or "delivery acknowledgement" in text)
