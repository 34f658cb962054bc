"""Bytes of a stored message to arguments, and of results to bytes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery import Celery
from kombu.compression import decompress
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_outbox.store.envelope import Envelope
from celery_outbox.store.job import Job


class Call(NamedTuple):
    """What a job's body is called with, and what follows it."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    #: ``callbacks``, ``errbacks``, ``chain`` and ``chord``.
    embed: Mapping[str, Any]


class Undecodable(Exception):
    """A stored payload cannot be read."""


def decode_call(app: Celery, job: Job) -> Call:
    """The arguments of a job, out of its row.

    Raises:
        Undecodable: the bytes cannot be read, or their content type is not accepted.
    """
    if job.body is None:
        raise Undecodable("the arguments were never recorded")
    try:
        envelope = job.envelope
        body: Any = job.body
        compression = envelope.headers.get("compression")
        if compression:
            body = decompress(body, compression)
        args, kwargs, embed = loads(
            body,
            envelope.content_type,
            envelope.content_encoding,
            accept=prepare_accept_content(app.conf.accept_content),
        )
        return Call(list(args), dict(kwargs), dict(embed or {}))
    except Exception as error:  # foreign bytes: decoders raise what they like
        raise Undecodable(f"{type(error).__name__}: {error}") from error


def encode_call(app: Celery, call: Call, serializer: str) -> tuple[bytes, str, str]:
    """The body of an adopted message: its bytes, content type and encoding.

    Pickle is used where the task's serializer cannot do it, provided that workers accept it.

    Raises:
        kombu.exceptions.EncodeError: neither can.
    """
    accepted = prepare_accept_content(app.conf.accept_content) or ()
    body = (list(call.args), dict(call.kwargs), dict(call.embed))
    try:
        content_type, encoding, data = dumps(body, serializer=serializer)
    except EncodeError:
        if "application/x-python-serialize" not in accepted:
            raise
        content_type, encoding, data = dumps(body, serializer="pickle")
    return _as_bytes(data), content_type, encoding


def encode_result(app: Celery, value: Any) -> tuple[bytes, str]:
    """A result as bytes, with its content type and encoding.

    Raises:
        kombu.exceptions.EncodeError: ``result_serializer`` cannot encode it.
    """
    content_type, encoding, data = dumps(value, serializer=app.conf.result_serializer)
    return _as_bytes(data), f"{content_type}; charset={encoding}"


def decode_result(result: bytes | None, result_type: str | None) -> Any:
    """A stored result as the value that it was; ``None`` where none was stored."""
    if result is None or result_type is None:
        return None
    content_type, _, encoding = result_type.partition("; charset=")
    # It was written by this application into its own database, whatever workers accept.
    return loads(result, content_type, encoding, accept=[content_type])


def envelope_of(request: Mapping[str, Any], content_type: str, encoding: str) -> Envelope:
    """The envelope of a message that reached a worker without a job."""
    delivery = request.get("delivery_info") or {}
    properties = {
        name: value
        for name, value in (request.get("properties") or {}).items()
        if name in ("correlation_id", "reply_to", "priority", "delivery_mode") and value is not None
    }
    return Envelope(
        exchange=delivery.get("exchange") or "",
        routing_key=delivery.get("routing_key") or "",
        queue=None if delivery.get("exchange") else delivery.get("routing_key"),
        headers={name: value for name, value in request.items() if name not in _NOT_HEADERS},
        properties=properties,
        content_type=content_type,
        content_encoding=encoding,
    )


#: What Celery's worker adds to the headers of a message, and what belongs to its body.
_NOT_HEADERS = frozenset(
    {
        "args",
        "kwargs",
        "callbacks",
        "errbacks",
        "chain",
        "chord",
        "properties",
        "reply_to",
        "correlation_id",
        "hostname",
        "delivery_info",
        "is_eager",
        "compression",
        "loglevel",
        "logfile",
    }
)


def _as_bytes(data: bytes | str) -> bytes:
    return data.encode("utf-8") if isinstance(data, str) else data
