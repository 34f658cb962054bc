"""Makes the message that goes to the broker out of an outbox row."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kombu import Exchange, Queue, binding
from kombu.serialization import dumps, registry

from celery_outbox.store.envelope import Envelope
from celery_outbox.store.messages import QUARANTINE, Message

#: Version of the claim-check message: the worker reads everything else from the job's row.
MESSAGE_VERSION = 1

#: The content type of messages that carry no arguments, wherever workers accept it.
JSON = "application/json"

#: Headers that the database has the say in, or that describe a body that is not sent.
_NOT_SENT = ("expires", "compression")

#: What a header of a copy may have, in bytes, and in tables within tables. A name, like every
#: property, has at most 255 bytes in AMQP; all headers together must fit into one frame.
_LONGEST_TEXT = 16 * 1024
_LONGEST_NAME = 255
_DEEPEST = 10


@dataclass
class Wire:
    """A message as a publisher sends it; ``id`` is its outbox row."""

    id: int
    exchange: str
    routing_key: str
    body: bytes = field(repr=False)
    content_type: str
    content_encoding: str
    headers: dict[str, Any] = field(repr=False)
    properties: dict[str, Any]
    #: The queue by its name, declared from the configuration; and what only the call knew.
    queue: str | None = None
    declare: list[Queue | Exchange] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        """What a message that the broker returns is recognized by."""
        return (str(self.properties.get("correlation_id")), self.exchange, self.routing_key)


def build(message: Message, quarantine: Queue, accepts_json: bool = True) -> Wire:
    """The message of an outbox row.

    Arguments:
        quarantine: the quarantine queue, where copies go.
        accepts_json: whether workers accept JSON; else a message without arguments has the
            content type of the call.

    Raises:
        ValueError, TypeError, KeyError: the stored envelope cannot be read.
    """
    envelope = message.envelope
    if message.kind == QUARANTINE:
        return _copy(message, envelope, quarantine, accepts_json)
    if message.relay:
        return _relayed(message, envelope)
    return _claim_check(message, envelope, accepts_json)


def _claim_check(message: Message, envelope: Envelope, accepts_json: bool) -> Wire:
    """For a task of ours: who the job is, but not what it was called with."""
    body, content_type, encoding = _no_arguments(JSON if accepts_json else envelope.content_type)
    headers = {name: value for name, value in envelope.headers.items() if name not in _NOT_SENT}
    headers |= {
        # A message that came without a usable id is a job under another one.
        "id": message.job_id,
        "task": message.task,
        "outbox_version": MESSAGE_VERSION,
        "eta": None,
        "retries": message.attempt,
    }
    properties = dict(envelope.properties)
    # Expiry is decided in the database, by its clock: a message that the broker expires
    # would be dead-lettered as if it had failed.
    properties.pop("expiration", None)
    return Wire(
        id=message.id,
        exchange=envelope.exchange,
        routing_key=envelope.routing_key,
        body=body,
        content_type=content_type,
        content_encoding=encoding,
        headers=headers,
        properties=properties,
        queue=envelope.queue,
        declare=[_entity(each) for each in envelope.declare],
    )


def _relayed(message: Message, envelope: Envelope) -> Wire:
    """For a task of another service: everything, with what is left of its time to live."""
    properties = dict(envelope.properties)
    if message.expires_at is not None and "expiration" in properties:
        left = max((message.expires_at - message.now).total_seconds(), 0.0)
        properties["expiration"] = str(int(left * 1000))
    return Wire(
        id=message.id,
        exchange=envelope.exchange,
        routing_key=envelope.routing_key,
        body=message.body or b"",
        content_type=envelope.content_type or "application/data",
        content_encoding=envelope.content_encoding or "binary",
        headers=envelope.headers,
        properties=properties,
        queue=envelope.queue,
        declare=[_entity(each) for each in envelope.declare],
    )


def _copy(message: Message, envelope: Envelope, quarantine: Queue, accepts_json: bool) -> Wire:
    """For the quarantine queue: the claim check, and why the job is there."""
    wire = _claim_check(message, envelope, accepts_json)
    wire.exchange, wire.routing_key = quarantine.exchange.name, quarantine.routing_key
    wire.queue, wire.declare = None, [quarantine]
    wire.properties.pop("priority", None)
    if _has_room(message.job_id, _LONGEST_NAME):
        wire.properties.setdefault("correlation_id", message.job_id)
    # A header that no broker takes must not keep the copy from its queue.
    wire.headers = {name: each for name, each in wire.headers.items() if _is_plain({name: each})}
    wire.headers |= {
        "x-outbox-job-id": message.job_id,
        "x-outbox-reason": message.reason,
        "x-outbox-error-code": message.error_code,
        "x-outbox-attempt": message.attempt,
        "x-outbox-queue": envelope.queue,
    }
    return wire


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether every transport can carry a header's value."""
    if value is None or isinstance(value, (bool, float)):
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, str):
        return _has_room(value, _LONGEST_TEXT)
    if depth >= _DEEPEST:
        return False
    if isinstance(value, list):
        return all(_is_plain(each, depth + 1) for each in value)
    if not isinstance(value, dict):
        return False
    return all(
        _has_room(name, _LONGEST_NAME) and _is_plain(each, depth + 1)
        for name, each in value.items()
    )


def _has_room(text: str, limit: int) -> bool:
    try:
        return len(text.encode("utf-8")) <= limit
    except UnicodeEncodeError:
        # Half a surrogate pair, out of the JSON of another client.
        return False


@lru_cache(maxsize=16)
def _no_arguments(content_type: str | None) -> tuple[bytes, str, str]:
    """A body without arguments that Celery can unpack."""
    name = registry.type_to_name.get(content_type, "json")
    sent_type, encoding, body = dumps(([], {}, {}), serializer=name)
    return (body.encode("utf-8") if isinstance(body, str) else body), sent_type, encoding


def _entity(described: dict[str, Any]) -> Queue | Exchange:
    """A queue or an exchange, out of what ``as_dict`` of kombu's said of it."""
    options = {name: value for name, value in described.items() if value is not None}
    if "bindings" not in options:
        return Exchange(options.pop("name", ""), **options)
    bindings = [_binding(each) for each in options.pop("bindings")]
    exchange = options.pop("exchange", None)
    return Queue(
        options.pop("name"),
        None if exchange is None else _entity(exchange),
        bindings=bindings,
        **options,
    )


def _binding(described: dict[str, Any]) -> binding:
    options = dict(described)
    exchange = options.pop("exchange")
    return binding(None if exchange is None else _entity(exchange), **options)
