"""Bytes of a stored message to arguments, and of results to bytes and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery import Celery
from celery.result import ResultBase
from kombu.compression import decompress
from kombu.exceptions import EncodeError, SerializerNotInstalled
from kombu.serialization import dumps, loads, prepare_accept_content, registry

from celery_outbox.execute.storable import storable, storable_properties
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
        payload = loads(
            body,
            envelope.content_type,
            envelope.content_encoding,
            accept=prepare_accept_content(app.conf.accept_content),
        )
        if isinstance(payload, Mapping):
            # A message of Celery's first protocol, kept as it came.
            embed = {name: payload.get(name) for name in ("callbacks", "errbacks", "chord")}
            return Call(list(payload.get("args", ())), dict(payload.get("kwargs", {})), embed)
        args, kwargs, embed = payload
        if not isinstance(args, (list, tuple)):
            args = list(args)
        return Call(args, dict(kwargs), dict(embed or {}))
    except Exception as error:  # foreign bytes: decoders raise what they like
        raise Undecodable(f"{type(error).__name__}: {error}") from error


def encode_call(app: Celery, call: Call, serializer: str) -> tuple[bytes, str, str]:
    """The body of an adopted message: its bytes, content type and encoding.

    Where the task's serializer cannot do it, another one is used that workers accept: they have
    read the message with one of these.

    Raises:
        kombu.exceptions.EncodeError: none can.
    """
    body = (list(call.args), dict(call.kwargs), dict(call.embed))
    try:
        content_type, encoding, data = dumps(body, serializer=serializer)
    except EncodeError:
        content_type, encoding, data = _encode_otherwise(app, body)
    return _as_bytes(data), content_type, encoding


def _encode_otherwise(app: Celery, body: Any) -> tuple[str, str, bytes | str]:
    failure: EncodeError | None = None
    for accepted in sorted(prepare_accept_content(app.conf.accept_content) or ()):
        try:
            encoded: tuple[str, str, bytes | str] = dumps(
                body, serializer=registry.type_to_name.get(accepted, accepted)
            )
            return encoded
        except (EncodeError, SerializerNotInstalled) as error:
            failure = EncodeError(str(error))
    raise failure or EncodeError("no content type is accepted")


def encode_result(app: Celery, value: Any) -> tuple[bytes, str]:
    """A result as bytes, with its content type and encoding; the result of another call that a
    body returned as Celery's backends keep it.

    Raises:
        kombu.exceptions.EncodeError: ``result_serializer`` cannot encode it.
    """
    serializer = app.conf.result_serializer
    if serializer != "pickle" and isinstance(value, ResultBase):
        value = value.as_tuple()
    content_type, encoding, data = dumps(value, serializer=serializer)
    return _as_bytes(data), f"{content_type}; charset={encoding}"


def decode_result(result: bytes | None, result_type: str | None) -> Any:
    """A stored result as the value that it was; ``None`` where none was stored."""
    if result is None or result_type is None:
        return None
    content_type, _, encoding = result_type.partition("; charset=")
    # It was written by this application into its own database, whatever workers accept.
    return loads(result, content_type, encoding, accept=[content_type])


def envelope_of(
    request: Mapping[str, Any], queue: str | None, content_type: str, encoding: str
) -> Envelope:
    """The envelope of a message that reached a worker without a job.

    Arguments:
        queue: where the message came from, as far as that is known.
    """
    delivery = request.get("delivery_info") or {}
    return Envelope(
        exchange=delivery.get("exchange") or "",
        routing_key=delivery.get("routing_key") or "",
        queue=queue,
        headers={
            str(name): storable(value)
            for name, value in request.items()
            if name not in _NOT_HEADERS
        },
        properties=storable_properties(request.get("properties")),
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
