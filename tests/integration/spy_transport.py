"""A broker in memory that notes what is declared and published, in the order in which it comes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

from kombu.transport import memory, virtual

#: For ``broker_transport``.
SPY_TRANSPORT = f"{__name__}:Transport"


@dataclass(frozen=True)
class Published:
    """A message as the broker gets it."""

    exchange: str
    routing_key: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    content_type: str
    content_encoding: str
    body: bytes


class Notes:
    """What has reached the broker since the last :meth:`forget`."""

    def __init__(self) -> None:
        self.published: list[Published] = []
        self.declared: list[tuple[str, dict[str, Any]]] = []

    def forget(self) -> None:
        """Start with an empty broker."""
        self.published.clear()
        self.declared.clear()
        Channel.queues.clear()
        Transport.global_state.clear()

    def declarations(self) -> list[str]:
        """What was declared for a message, sorted: neither for copies nor for events."""
        beside = {"outbox.quarantine", "celeryev"}
        kept = (each for each in self.declared if not beside & set(map(str, each[1].values())))
        return sorted(repr((what, sorted(options.items()))) for what, options in kept)


NOTES = Notes()


class Channel(memory.Channel):
    """A channel that notes what passes."""

    queues: ClassVar[dict[str, Any]] = {}

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> dict[str, Any]:
        """Keep the options that RabbitMQ gets as arguments."""
        return {**(arguments or {}), **{k: v for k, v in options.items() if v is not None}}

    def queue_declare(self, queue: Any = None, passive: bool = False, **options: Any) -> Any:
        """Note a declared queue."""
        if not passive:
            NOTES.declared.append(("queue", {"queue": queue, **options}))
        return super().queue_declare(queue, passive, **options)

    def exchange_declare(self, exchange: Any = None, *args: Any, **options: Any) -> Any:
        """Note a declared exchange."""
        NOTES.declared.append(("exchange", {"exchange": exchange, **options}))
        return super().exchange_declare(exchange, *args, **options)

    def queue_bind(self, queue: Any, exchange: Any = None, *args: Any, **options: Any) -> Any:
        """Note a binding."""
        NOTES.declared.append(("binding", {"queue": queue, "exchange": exchange, **options}))
        return super().queue_bind(queue, exchange, *args, **options)

    def basic_publish(self, message: Any, exchange: str, routing_key: str, **options: Any) -> Any:
        """Note a message."""
        body = message["body"]
        NOTES.published.append(
            Published(
                exchange=exchange,
                routing_key=routing_key,
                headers=deepcopy(message["headers"]),
                properties={
                    name: deepcopy(value)
                    for name, value in message["properties"].items()
                    if name != "delivery_info" and value is not None
                },
                content_type=message["content-type"],
                content_encoding=message["content-encoding"],
                body=body.encode() if isinstance(body, str) else body,
            )
        )
        return super().basic_publish(message, exchange, routing_key, **options)

    def close(self) -> None:
        """Keep the queues: the broker outlives its connections."""
        virtual.Channel.close(self)


class Transport(memory.Transport):
    """The transport of that channel; its queues and exchanges are its own."""

    Channel = Channel
    global_state = virtual.BrokerState()
