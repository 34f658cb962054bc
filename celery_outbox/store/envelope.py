"""The complete Celery message of a job, as the job's row keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kombu.utils import json


@dataclass
class Envelope:
    """Everything of a message but its body.

    Attributes:
        exchange: name of the exchange, ``""`` for the default one.
        routing_key: routing key; with the default exchange the queue's name.
        queue: the queue's name, where the call had one.
        headers: Celery's task headers.
        properties: message properties (correlation id, reply-to, priority, delivery mode, ...).
        content_type: content type of the body.
        content_encoding: content encoding of the body.
        declare: queues that the configuration does not know, and exchanges, as kombu's ``as_dict``
            gives them, to be declared before the message is published.
    """

    exchange: str
    routing_key: str
    queue: str | None
    headers: dict[str, Any] = field(repr=False)
    properties: dict[str, Any] = field(repr=False)
    content_type: str | None = None
    content_encoding: str | None = None
    declare: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads.

        kombu's JSON keeps the types that headers may have beside JSON's own (datetime, UUID,
        Decimal, bytes); NUL and others are escaped.
        """
        return str(json.dumps(self.__dict__, separators=(",", ":")))

    @classmethod
    def from_json(cls, text: str) -> Envelope:
        """Read what :meth:`to_json` wrote; names that this version does not know are ignored."""
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})
