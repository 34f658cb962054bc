"""A message that no worker can run, kept whole: what it says, and what its row will keep."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kombu.message import Message
from kombu.utils.json import dumps

from celery_outbox.execute.delivery import VERSION_HEADER
from celery_outbox.execute.storable import (
    is_storable,
    storable,
    storable_body,
    storable_properties,
)
from celery_outbox.store.envelope import Envelope
from celery_outbox.store.recording import NO_TASK
from celery_outbox.store.schema import MAX_JOB_ID, MAX_NAME

#: How the headers begin that brokers add to a message which they deliver again.
_ADDED = (
    "redelivered",
    "x-delivery-count",
    "x-acquired-count",
    "x-death",
    "x-first-death-",
    "x-last-death-",
)


@dataclass(frozen=True)
class Foreign:
    """What is known of a message that no worker can run.

    Attributes:
        job_id: the id that it names, where that can be a job's.
        own_id: an id made from the whole message, for one without a usable id and for one whose
            id another job has. The same when the broker delivers the message again.
        task: the task that it names, or ``NO_TASK``.
        queue: where it came from, as far as that is known.
        is_claim_check: it came through the outbox, so its arguments are in the job's row.
        redelivered: the broker delivered it before.
        envelope: everything but the body, with the routing that leads to ``queue`` again.
        body: the bytes as they came.
    """

    job_id: str | None
    own_id: str
    task: str
    queue: str | None
    is_claim_check: bool
    redelivered: bool
    envelope: Envelope
    body: bytes | None = field(repr=False)

    @classmethod
    def of(cls, message: Message, queue: str | None) -> Foreign:
        """Read it from a message, of which nothing may be taken for granted.

        Arguments:
            queue: where the message came from, as far as that is known.
        """
        headers = message.headers if isinstance(message.headers, Mapping) else {}
        kept = {str(name): value for name, value in headers.items()}
        if not message.errors:
            # kombu has decompressed the body.
            kept.pop("compression", None)
        info = message.delivery_info if isinstance(message.delivery_info, Mapping) else {}
        envelope = Envelope(
            exchange="" if queue else _text(info.get("exchange")) or "",
            routing_key=queue or _text(info.get("routing_key")) or "",
            queue=queue,
            headers={name: storable(value) for name, value in kept.items()},
            properties=storable_properties(message.properties),
            content_type=_text(message.content_type),
            content_encoding=_text(message.content_encoding),
        )
        return cls.kept(
            envelope, storable_body(message.body), _fields(message), bool(info.get("redelivered"))
        )

    @classmethod
    def kept(
        cls,
        envelope: Envelope,
        body: bytes | None,
        fields: Mapping[str, Any],
        redelivered: bool,
    ) -> Foreign:
        """Build it from what its row will keep.

        Arguments:
            fields: where the message says its ``id`` and ``task``.
        """
        job_id, task = fields.get("id"), fields.get("task")
        return cls(
            job_id=job_id if is_storable(job_id, MAX_JOB_ID) else None,
            own_id=own_id(envelope, body),
            task=str(task) if is_storable(task, MAX_NAME) else NO_TASK,
            queue=envelope.queue if is_storable(envelope.queue, MAX_NAME) else None,
            is_claim_check=fields.get(VERSION_HEADER) is not None,
            redelivered=redelivered,
            envelope=envelope,
            body=body,
        )


def own_id(envelope: Envelope, body: bytes | None) -> str:
    """The id of a message without a usable one, made from the whole of it.

    Arguments:
        envelope: as a row keeps it.
    """
    headers = {
        name: value for name, value in envelope.headers.items() if not name.startswith(_ADDED)
    }
    described = [headers, envelope.content_type, envelope.content_encoding]
    text = dumps(described, sort_keys=True).encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(text + b"\x00" + (body or b"")).hexdigest()
    return f"invalid-{digest[:32]}"


def _fields(message: Message) -> Mapping[str, Any]:
    headers = message.headers if isinstance(message.headers, Mapping) else {}
    if "task" in headers or "id" in headers:
        return headers
    try:
        body = message.payload
    except Exception:  # decoders raise what they like
        return headers
    return body if isinstance(body, Mapping) else headers


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
