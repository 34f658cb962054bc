"""AMQP's bytes of a message that is published, as py-amqp would write them.

py-amqp encodes each header of each message anew, and most are the same in all of them; and it
writes each message to the socket by itself.
"""

from __future__ import annotations

from functools import lru_cache
from struct import pack
from typing import Any

from amqp.basic_message import Message
from amqp.serialization import dumps

from celery_outbox.dispatch.wire import Wire

#: Class and method (AMQP 0-9-1, section 1.8): basic.publish.
_BASIC, _PUBLISH = 60, 40

#: Types of frames (section 4.2.3), the octet that ends each, and what stands around its payload.
_METHOD, _HEADER, _BODY, _END = 1, 2, 3, b"\xce"
_AROUND = 8

#: Characters of a value, as it looks, up to which its bytes are kept: they are kept for thousands.
_MOST_KEPT = 512

#: The order and the types of properties, and the bit of each.
_PROPERTIES = [
    (name, kind, 1 << 15 - place) for place, (name, kind) in enumerate(Message.PROPERTIES)
]


def publish_frames(wire: Wire, channel: int, frame_max: int) -> bytes:
    """What is sent for a message: its method, its header and its body.

    Arguments:
        channel: number of the channel.
        frame_max: size of the largest frame that the connection permits, in bytes.

    Raises:
        amqp.exceptions.FrameSyntaxError, struct.error, TypeError, ValueError, OverflowError:
            it cannot be encoded.
    """
    method = pack(">HHH", _BASIC, _PUBLISH, 0) + _short(wire.exchange) + _short(wire.routing_key)
    # The last octet has the bits of "mandatory" and "immediate".
    frames = [_frame(_METHOD, channel, method + b"\x01")]
    header = pack(">HHQ", _BASIC, 0, len(wire.body)) + _properties(wire)
    frames.append(_frame(_HEADER, channel, header))
    most = frame_max - _AROUND
    for start in range(0, len(wire.body), most):
        frames.append(_frame(_BODY, channel, wire.body[start : start + most]))
    return b"".join(frames)


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return pack(">BHI", kind, channel, len(payload)) + payload + _END


def _properties(wire: Wire) -> bytes:
    values = {
        **wire.properties,
        "content_type": wire.content_type,
        "content_encoding": wire.content_encoding,
        "application_headers": wire.headers,
    }
    flags, encoded = 0, []
    for name, kind, bit in _PROPERTIES:
        value = values.get(name)
        if value is None:
            continue
        flags |= bit
        if name == "application_headers":
            encoded.append(_table(value))
        elif kind == "s" and isinstance(value, str):
            encoded.append(_short(value))
        else:
            encoded.append(dumps(kind, [value]))
    return pack(">H", flags) + b"".join(encoded)


def _table(headers: dict[str, Any]) -> bytes:
    items = b"".join([_item(name, value) for name, value in headers.items()])
    return pack(">I", len(items)) + items


def _item(name: str, value: Any) -> bytes:
    kind = type(value)
    if kind is str:
        text = value.encode("utf-8", "surrogatepass")
        return b"".join((_name(name), pack(">cI", b"S", len(text)), text))
    if value is None or kind is bool or kind is int:
        return _plain_item(name, value)
    same = _Same(value)
    return _other_item(name, same) if same.is_short else _encoded(name, value)


@lru_cache(maxsize=1024)
def _name(name: str) -> bytes:
    return _short(name)


@lru_cache(maxsize=4096, typed=True)
def _plain_item(name: str, value: int | bool | None) -> bytes:
    return _encoded(name, value)


class _Same:
    """A value as the key of a cache: tables are not hashable, and equal values may be of
    different types. What looks the same is the same."""

    __slots__ = ("_looks", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._looks = repr(value)

    @property
    def is_short(self) -> bool:
        return len(self._looks) <= _MOST_KEPT

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._looks == other._looks

    def __hash__(self) -> int:
        return hash(self._looks)


@lru_cache(maxsize=4096)
def _other_item(name: str, same: _Same) -> bytes:
    return _encoded(name, same.value)


def _encoded(name: str, value: Any) -> bytes:
    # A table's length comes first.
    return dumps("F", [{name: value}])[4:]


def _short(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pack("B", len(encoded)) + encoded
