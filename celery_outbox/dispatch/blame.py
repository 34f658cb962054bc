"""Which errors of a connection to RabbitMQ are about one message, and what they say of it."""

from __future__ import annotations

from amqp.exceptions import AMQPError, ChannelError

from celery_outbox.dispatch.publisher import Outcome

#: Connection errors by which the broker answers a message that it cannot parse (AMQP 0-9-1,
#: section 1.2 "Constants"): frame error, syntax error, command invalid, unexpected frame, not
#: implemented. Another message would have gone through.
_MESSAGE_IS_TO_BLAME = frozenset({501, 502, 503, 505, 540})


def is_about_a_message(error: AMQPError) -> bool:
    """Whether another message would have gone through."""
    return isinstance(error, ChannelError) or error.reply_code in _MESSAGE_IS_TO_BLAME


def blame(error: AMQPError) -> Outcome:
    """What became of a message that was sent alone and answered with this error."""
    if error.reply_code == 404:
        return Outcome.UNROUTABLE
    text = str(error.reply_text or error).lower()
    if error.reply_code == 406 and "size" in text:
        return Outcome.TOO_LARGE
    return Outcome.UNPUBLISHABLE
