"""Messages that not even the transport can read: such a one stops every worker that gets it.

py-amqp raises where a property is not UTF-8, or a timestamp is past the year 9999 (milliseconds,
for one), and the broker hands the message to the next worker. kombu's Redis transport has taken
the message out of its list by the time it finds that it cannot read it. Here the worker's own
connection gets a readable message instead, which says that it stands for one that is not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from amqp.basic_message import Message as AmqpMessage
from amqp.serialization import decode_properties_basic
from kombu import Connection
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from kombu.utils.uuid import uuid

#: A header of the message that stands for an unreadable one: what was found there instead.
UNREADABLE_HEADER = "x-outbox-unreadable"

#: Frames of this kind carry the properties of a message (AMQP 0-9-1, section 4.2.6.1).
_HEADER_FRAME = 2
#: Bytes before the properties: class, weight and size of the body.
_BEFORE_PROPERTIES = 12


def read_everything(connection: Connection) -> None:
    """Make a connection hand over messages that it cannot read, instead of raising.

    Arguments:
        connection: an established one; a new one has to be given again.
    """
    transport = connection.transport
    handle_frame = getattr(connection.connection, "on_inbound_frame", None)
    if handle_frame is not None:
        connection.connection.on_inbound_frame = _tolerant_frames(handle_frame)
    elif hasattr(transport, "_deliver"):
        transport._deliver = _tolerant_deliver(transport._deliver, connection)
        if transport.driver_type == "redis":
            _tolerate_in_lists(connection.default_channel, transport)


def _tolerant_frames(handle: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def on_frame(frame: Any) -> Any:
        try:
            return handle(frame)
        except Exception:
            kind, channel, content = frame
            if kind != _HEADER_FRAME or _can_read_properties(content):
                raise
        # py-amqp still waits for the properties of this message.
        found = base64.b64encode(bytes(content[_BEFORE_PROPERTIES:])).decode("ascii")
        stand_in = AmqpMessage(application_headers={UNREADABLE_HEADER: found})
        readable = bytes(content[:_BEFORE_PROPERTIES]) + stand_in._serialize_properties()
        return handle((kind, channel, readable))

    return on_frame


def _can_read_properties(content: Any) -> bool:
    try:
        decode_properties_basic(content, _BEFORE_PROPERTIES)
    except Exception:  # whatever the decoders of the types raise
        return False
    return True


def _tolerant_deliver(
    deliver: Callable[[Any, str], None], connection: Connection
) -> Callable[[Any, str], None]:
    def on_message(message: Any, queue: str) -> None:
        try:
            deliver(message, queue)
        except Exception:
            if _can_build(message, connection.default_channel):
                raise
            deliver(_stand_in(json.dumps(message, default=repr), queue), queue)

    return on_message


def _can_build(message: Any, channel: Any) -> bool:
    """Whether kombu's virtual transports can make a message of what they found."""
    try:
        built = channel.Message(message, channel=channel)
        info = built.delivery_info
        return isinstance(built.delivery_tag, str) and {"exchange", "routing_key"} <= info.keys()
    except Exception:  # anything may be anything in there
        return False


def _tolerate_in_lists(channel: Any, transport: Any) -> None:
    """Keep what came out of a Redis list in sight until it has been read."""
    answer, read = channel.client.parse_response, channel.handlers["BRPOP"]
    last: list[Any] = []

    def parse_response(*args: Any, **options: Any) -> Any:
        found = answer(*args, **options)
        last[:] = [found]
        return found

    def read_list(**options: Any) -> Any:
        last.clear()
        try:
            return read(**options)
        except Exception:
            found = last[0] if last else None
            if not isinstance(found, (list, tuple)) or _can_parse(found[1]):
                raise
            queue, item = found
        name = bytes_to_str(queue).rsplit(channel.sep, 1)[0]
        text = item.decode("utf-8", "backslashreplace") if isinstance(item, bytes) else str(item)
        transport._deliver(_stand_in(text, name), name)
        return True

    channel.client.parse_response = parse_response
    channel.handlers["BRPOP"] = read_list


def _can_parse(item: Any) -> bool:
    try:
        loads(bytes_to_str(item))
    except Exception:  # JSON, its encoding, and the types that kombu marks
        return False
    return True


def _stand_in(found: str, queue: str) -> Mapping[str, Any]:
    """A message of a virtual transport whose body is what was found in its place."""
    body = base64.b64encode(found.encode("utf-8", "surrogatepass")).decode("ascii")
    return {
        "body": body,
        "content-type": "application/data",
        "content-encoding": "binary",
        "headers": {UNREADABLE_HEADER: "body"},
        "properties": {
            "body_encoding": "base64",
            "delivery_mode": 2,
            "delivery_tag": uuid(),
            "delivery_info": {"exchange": "", "routing_key": queue},
        },
    }
