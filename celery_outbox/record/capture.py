"""Lets Celery build a message and catches it where it would go to the broker.

Routing, headers, stamps, links, priorities, absolute expiry and signals are Celery's own this
way, in every Celery version; serializer, compression and delivery mode are kombu's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu import Exchange, Producer, Queue

from celery_outbox.store.envelope import Envelope


class _Client:
    """Stands in for the kombu connection that Celery asks about connection errors."""

    connection_errors: tuple[type[Exception], ...] = ()
    recoverable_connection_errors: tuple[type[Exception], ...] = ()

    @contextmanager
    def _reraise_as_library_errors(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield


class _Connection:
    def __init__(self) -> None:
        self.client = _Client()


class _Channel:
    """Takes the one message that is published."""

    def __init__(self) -> None:
        self.connection = _Connection()
        self.message: dict[str, Any] | None = None
        self.exchange = ""
        self.routing_key = ""

    def prepare_message(
        self,
        body: bytes | str,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        properties = dict(properties or {})
        if priority is not None:
            properties["priority"] = priority
        return {
            "body": body.encode("utf-8") if isinstance(body, str) else body,
            "content_type": content_type,
            "content_encoding": content_encoding,
            "headers": headers or {},
            "properties": properties,
        }

    def basic_publish(
        self, message: dict[str, Any], exchange: str = "", routing_key: str = "", **options: Any
    ) -> None:
        self.message = message
        self.exchange = exchange
        self.routing_key = routing_key


class RecordingProducer(Producer):
    """A producer that keeps the message instead of sending it."""

    def __init__(self) -> None:
        self.caught = _Channel()
        self.declare: list[Queue | Exchange] = []
        super().__init__(self.caught, auto_declare=False)

    def publish(self, body: Any, **options: Any) -> None:
        """Catch the task's message; the ``task-sent`` event that may follow is not sent."""
        if self.caught.message is not None:
            if isinstance(body, dict) and body.get("type") == "task-sent":
                return
            raise AssertionError("Celery published twice for one call")
        # Declaring, retrying and waiting are for a real broker.
        self.declare = list(options.pop("declare", None) or [])
        for name in ("retry", "retry_policy", "timeout", "confirm_timeout"):
            options.pop(name, None)
        super().publish(body, retry=False, **options)

    def captured(self, known_queues: Any) -> tuple[Envelope, bytes]:
        """The message: everything but the body, and the body.

        Arguments:
            known_queues: ``app.amqp.queues``: these are declared from the configuration.
        """
        message = self.caught.message
        if message is None:
            raise AssertionError("Celery published nothing for the call")
        exchange, routing_key = self.caught.exchange, self.caught.routing_key
        queues = [entity for entity in self.declare if isinstance(entity, Queue)]
        queue = queues[0].name if queues else None
        if queue is None and exchange == "":
            queue = routing_key
        envelope = Envelope(
            exchange=exchange,
            routing_key=routing_key,
            queue=queue,
            headers=message["headers"],
            properties=message["properties"],
            content_type=message["content_type"],
            content_encoding=message["content_encoding"],
            declare=[
                _describe(entity)
                for entity in self.declare
                if not isinstance(entity, Queue) or entity.name not in known_queues
            ],
        )
        return envelope, message["body"]


def _describe(entity: Queue | Exchange) -> dict[str, Any]:
    """What a dispatcher needs to declare an entity that only the call knows."""
    described: dict[str, Any] = entity.as_dict(recurse=True)
    if isinstance(entity, Queue):
        described["bindings"] = [each.as_dict(recurse=True) for each in entity.bindings]
    return described
