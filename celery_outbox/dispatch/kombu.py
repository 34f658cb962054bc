"""Publishes through any kombu transport other than AMQP: Redis, filesystem, SQS, ...

These answer each publish by themselves (Redis: the reply to LPUSH), so a publish that returns
has been accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from celery import Celery
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import KombuError, OperationalError

from celery_outbox.dispatch.publisher import Outcome, Report, key_of, to_declare
from celery_outbox.dispatch.wire import Wire

#: With what Redis begins an error that is not about the command: out of memory, the disk is full, a
#: replica after a failover, a script that blocks, a cluster that is not whole, a missing login.
_REDIS_CODES = frozenset(
    {
        "OOM",
        "MISCONF",
        "READONLY",
        "LOADING",
        "BUSY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "NOREPLICAS",
        "NOAUTH",
    }
)
_REDIS_CLASSES = frozenset(
    {
        "OutOfMemoryError",
        "ReadOnlyError",
        "ExecAbortError",
        "ClusterDownError",
        "MasterDownError",
        "TryAgainError",
    }
)


class KombuPublisher:
    """One connection and one producer.

    Arguments:
        app: the Celery app, for the broker's URL and the declared queues.
        timeout: seconds to wait for the broker, where the transport can be told.
        quarantine: the quarantine queue, declared on each connection.
    """

    def __init__(self, app: Celery, *, timeout: float, quarantine: Queue | None = None) -> None:
        self._app = app
        self._timeout = timeout
        self._quarantine = quarantine
        self._connection: Connection | None = None
        self._producer: Producer | None = None
        self._declared: set[str] = set()

    def publish(self, wires: Sequence[Wire]) -> Report:
        """Send a batch; see :meth:`Publisher.publish`."""
        report = Report()
        for wire in wires:
            try:
                report.decide(wire, self._publish(wire))
            except self._outages() as error:
                report.outage = error
                self.close()
                break
            except Exception as error:  # whatever a transport raises about one message
                if _refuses_everybody(error):
                    report.outage = error
                    self.close()
                    break
                report.cannot_send(wire, error)
        return report

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._producer = self._connection, None, None
        self._declared.clear()
        if connection is None:
            return
        try:
            connection.release()
        except self._outages():
            connection.collect()

    def _publish(self, wire: Wire) -> Outcome:
        producer = self._ready_producer()
        self._declare(producer, wire)
        if not _is_routable(producer.channel, wire):
            return Outcome.UNROUTABLE
        properties = {k: v for k, v in wire.properties.items() if v is not None}
        if "expiration" in properties:
            # Milliseconds in the stored message, seconds for kombu.
            properties["expiration"] = int(properties["expiration"]) / 1000
        producer.publish(
            wire.body,
            exchange=wire.exchange,
            routing_key=wire.routing_key,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            headers=wire.headers,
            priority=properties.pop("priority", None),
            delivery_mode=properties.pop("delivery_mode", None),
            retry=False,
            **properties,
        )
        return Outcome.CONFIRMED

    def _ready_producer(self) -> Producer:
        if self._producer is None:
            connection = self._app.connection_for_write(
                connect_timeout=self._timeout,
                transport_options=_bounds(self._app, self._timeout),
            )
            self._connection = connection
            connection.ensure_connection(max_retries=1, timeout=self._timeout)
            self._producer = Producer(connection, auto_declare=False)
            if self._quarantine is not None:
                self._declare_entity(self._producer, self._quarantine)
        return self._producer

    def _declare(self, producer: Producer, wire: Wire) -> None:
        for entity in to_declare(self._app, wire, self._declared):
            self._declare_entity(producer, entity)

    def _declare_entity(self, producer: Producer, entity: Queue | Exchange) -> None:
        entity(producer.channel).declare()
        self._declared.add(key_of(entity))

    def _outages(self) -> tuple[type[BaseException], ...]:
        own: tuple[type[BaseException], ...] = ()
        if self._connection is not None:
            own = self._connection.connection_errors
        return (OperationalError, OSError, *own)


def _refuses_everybody(error: Exception) -> bool:
    """Whether a server refuses every write, for a cause that passes or an administrator mends."""
    code = re.match(r"[A-Z]+", str(error))
    # redis-py takes the code off an answer for which it has a class of its own.
    return type(error).__name__ in _REDIS_CLASSES or (
        type(error).__module__.startswith(("redis.", "valkey."))
        and code is not None
        and code.group() in _REDIS_CODES
    )


def _is_routable(channel: Any, wire: Wire) -> bool:
    """Whether a queue is bound for the message; kombu's virtual transports drop it otherwise."""
    lookup = getattr(channel, "_lookup", None)
    if lookup is None or not wire.exchange:
        return True
    try:
        if channel.typeof(wire.exchange).type == "fanout":
            # Nobody listening is no error for a broadcast.
            return True
        return bool(lookup(wire.exchange, wire.routing_key))
    except (KeyError, KombuError):
        return False


def _bounds(app: Celery, timeout: float) -> dict[str, Any]:
    """Socket timeouts for Redis, which has none by default, unless the app sets its own."""
    scheme = str(app.conf.broker_write_url or app.conf.broker_url or "").partition(":")[0]
    if not scheme.startswith(("redis", "sentinel", "valkey")):
        return {}
    configured = app.conf.broker_transport_options or {}
    names = ("socket_timeout", "socket_connect_timeout")
    return {name: timeout for name in names if name not in configured}
