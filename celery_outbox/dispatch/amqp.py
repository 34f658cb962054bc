"""Publishes to RabbitMQ: ``mandatory`` messages with pipelined confirms.

Confirms are always on, whatever the app's configuration says: a publish without them may be lost
without a sign (RabbitMQ documentation, "Consumer Acknowledgements and Publisher Confirms").
"""

from __future__ import annotations

import logging
import select
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from amqp.exceptions import AMQPError, ChannelError, FrameSyntaxError
from celery import Celery
from kombu import Connection, Exchange, Queue
from kombu.exceptions import OperationalError

from celery_outbox.dispatch.blame import blame, is_about_a_message
from celery_outbox.dispatch.frames import publish_frames
from celery_outbox.dispatch.publisher import Outcome, Report, key_of, to_declare
from celery_outbox.dispatch.replies import ReplyQueues
from celery_outbox.dispatch.wire import Wire
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.dispatch")

#: Bytes that are written to the socket at a time.
_WRITE = 32 * 1024

#: Seconds to wait for the rest of what has arrived in part, before something else is sent.
_MOMENT = 0.001

#: What py-amqp raises for a message that it cannot encode.
_ENCODING_ERRORS = (FrameSyntaxError, struct.error, TypeError, ValueError, OverflowError)


class AmqpPublisher:
    """One connection and one channel in confirm mode.

    Arguments:
        app: the Celery app, for the broker's URL and the declared queues.
        window: messages that may be on their way before the oldest is confirmed.
        timeout: seconds to wait for the broker, at each step.
        quarantine: the quarantine queue, declared with its exchange on each connection.
    """

    def __init__(
        self, app: Celery, *, window: int, timeout: float, quarantine: Queue | None = None
    ) -> None:
        self._app = app
        self._window = window
        self._timeout = timeout
        self._quarantine = quarantine
        self._connection: Connection | None = None
        self._channel: Any = None
        self._declared: set[str] = set()
        self._reply_queues = ReplyQueues(app)
        self._declared_replies: set[str] = set()
        self._next_tag = 1
        self._pending: OrderedDict[int, Wire] = OrderedDict()
        #: Encoded, and not written to the socket yet.
        self._unsent = bytearray()
        self._returned: dict[tuple[str, str, str], str] = {}
        self._report = Report()

    def publish(self, wires: Sequence[Wire]) -> Report:
        """Send a batch; see :meth:`Publisher.publish`."""
        self._report = Report()
        # They are gone when their callers have left them.
        self._declared_replies.clear()
        try:
            try:
                self._send(wires)
            except (ChannelError, AMQPError) as error:
                if not is_about_a_message(error):
                    raise
                # One message made the broker close the channel, and with it hid what became
                # of its neighbours: each of them goes alone.
                self._reset(error)
                self._isolate([wire for wire in wires if wire.id not in self._report.outcomes])
        except _outages(self._connection) as error:
            self._report.outage = error
            self._abandon()
        return self._report

    def close(self) -> None:
        """Close the connection; does not wait for a broker that is silent."""
        self._abandon()

    def _isolate(self, wires: Sequence[Wire]) -> None:
        for wire in wires:
            try:
                self._send([wire])
            except (ChannelError, AMQPError) as error:
                if not is_about_a_message(error):
                    raise
                outcome = blame(error)
                log_event(
                    logger,
                    logging.WARNING,
                    "outbox.publish_refused",
                    message=wire.id,
                    outcome=outcome.value,
                )
                self._report.decide(wire, outcome)
                self._reset(error)

    def _send(self, wires: Sequence[Wire]) -> None:
        self._ready_channel()
        for wire in wires:
            if wire.id in self._report.outcomes:
                continue
            self._declare(wire)
            channel = self._ready_channel()
            self._await(self._window - 1)
            try:
                self._publish(channel, wire)
            except _ENCODING_ERRORS as error:
                self._report.cannot_send(wire, error)
            if len(self._unsent) >= _WRITE:
                self._flush()
        self._await(0)

    def _publish(self, channel: Any, wire: Wire) -> None:
        """Encode a message, to be written with its neighbours."""
        self._unsent += publish_frames(wire, channel.channel_id, channel.connection.frame_max)
        self._pending[self._next_tag] = wire
        self._next_tag += 1

    def _await(self, most: int) -> None:
        """Wait until no more than so many messages are undecided."""
        if len(self._pending) > most:
            self._flush()
        while len(self._pending) > most:
            self._drain()

    def _flush(self) -> None:
        """Write what is encoded and not sent."""
        if not self._unsent:
            return
        frames, self._unsent = bytes(self._unsent), bytearray()
        # A channel or connection that the broker has closed is not written to.
        transport = self._hear()
        try:
            with self._bounded():
                transport.write(frames)
        except TimeoutError as error:
            raise OperationalError("the broker does not read") from error
        except OSError:
            # It has hung up, and may have said why.
            self._hear()
            raise

    def _hear(self) -> Any:
        """Read what the broker has said, without waiting for more; returns py-amqp's transport."""
        if self._connection is None:
            raise OperationalError("the connection is closed")
        with suppress(TimeoutError):
            while _has_arrived(self._connection.connection.transport.sock):
                # Of a frame that has arrived in part, py-amqp would ask for the rest without end
                # if it were not to wait at all.
                self._connection.drain_events(timeout=_MOMENT)
        return self._connection.connection.transport

    def _drain(self) -> None:
        """Read what the broker answers; at least one message must be decided in time."""
        before, deadline = len(self._pending), time.monotonic() + self._timeout
        while len(self._pending) == before:
            left = deadline - time.monotonic()
            if left <= 0:
                raise OperationalError("the broker did not confirm in time")
            if self._connection is None:
                raise OperationalError("the connection is closed")
            try:
                self._connection.drain_events(timeout=left)
            except TimeoutError as error:
                raise OperationalError("the broker did not confirm in time") from error

    # -- what the broker says ----------------------------------------------------------

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for wire in self._decided(tag, multiple):
            returned = self._returned.pop(wire.key, None)
            outcome = Outcome.CONFIRMED if returned is None else Outcome.UNROUTABLE
            self._report.decide(wire, outcome)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for wire in self._decided(tag, multiple):
            self._report.decide(wire, Outcome.NACKED)

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        # RabbitMQ returns an unroutable message before it confirms it.
        key = (str(message.properties.get("correlation_id")), exchange, routing_key)
        self._returned[key] = str(error)

    def _decided(self, tag: int, multiple: bool) -> list[Wire]:
        if not multiple:
            wire = self._pending.pop(tag, None)
            return [] if wire is None else [wire]
        tags = [each for each in self._pending if each <= tag]
        return [self._pending.pop(each) for each in tags]

    # -- connection, channel, queues ---------------------------------------------------

    def _ready_channel(self) -> Any:
        if self._channel is not None:
            return self._channel
        if self._connection is None:
            # Confirms are counted here, over many messages, not awaited for each one.
            self._connection = self._app.connection_for_write(
                connect_timeout=self._timeout,
                heartbeat=0,
                transport_options={"confirm_publish": False},
            )
            self._connection.connect()
        with self._bounded():
            channel = self._connection.channel()
            channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)
        self._channel, self._next_tag = channel, 1
        self._forget()
        self._returned.clear()
        if self._quarantine is not None and self._quarantine.name not in self._declared:
            self._declare_entity(self._quarantine)
        return self._channel or self._ready_channel()

    def _declare(self, wire: Wire) -> None:
        for entity in to_declare(self._app, wire, self._declared):
            self._declare_entity(entity)
        replies = self._reply_queues.of(wire)
        if replies is not None and replies.name not in self._declared_replies:
            self._declared_replies.add(replies.name)
            self._declare_entity(replies)

    def _declare_entity(self, entity: Queue | Exchange) -> None:
        self._declared.add(key_of(entity))
        # The replies to a declaration must not be mixed with confirms that are due.
        channel = self._ready_channel()
        self._await(0)
        try:
            with self._bounded():
                entity(channel).declare()
        except ChannelError as error:
            # It exists with other arguments, or we may not declare it: if it cannot take
            # messages the broker will return them.
            log_event(
                logger,
                logging.WARNING,
                "outbox.declare_refused",
                queue=entity.name,
                code=error.code,
            )
            self._drop_channel()

    def _forget(self) -> None:
        self._pending.clear()
        self._unsent.clear()

    def _bounded(self) -> Any:
        if self._connection is None:
            raise OperationalError("the connection is closed")
        return self._connection.connection.transport.having_timeout(self._timeout)

    def _reset(self, error: AMQPError) -> None:
        """After an error that a message caused: a new channel, or a new connection."""
        if isinstance(error, ChannelError):
            self._drop_channel()
        else:
            self._abandon()

    def _drop_channel(self) -> None:
        channel, self._channel = self._channel, None
        self._forget()
        if channel is None or channel.connection is None:
            return
        try:
            with self._bounded():
                channel.close()
        except ChannelError:
            log_event(logger, logging.DEBUG, "outbox.channel_closed")

    def _abandon(self) -> None:
        """Let the connection go without a handshake, which a stuck broker would not answer."""
        connection, self._connection, self._channel = self._connection, None, None
        self._forget()
        self._declared.clear()
        if connection is not None:
            connection.collect()


def _has_arrived(sock: Any) -> bool:
    """Whether there is something to read, or to hear of, on a socket."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    # TLS may have deciphered more than was asked for.
    return bool(poll.poll(0)) or getattr(sock, "pending", int)() > 0


def _outages(connection: Connection | None) -> tuple[type[BaseException], ...]:
    own = connection.connection_errors if connection is not None else ()
    return (OperationalError, AMQPError, OSError, *own)
