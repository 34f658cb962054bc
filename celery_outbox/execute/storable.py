"""What of a message the database can hold, and the next broker: nothing in it can be trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any, TypeGuard
from uuid import UUID

#: Longest text property that AMQP carries, in bytes.
MAX_PROPERTY = 255

#: Tables within tables that are kept; nobody needs as many.
_DEEPEST = 30


def is_storable(value: Any, limit: int) -> TypeGuard[str]:
    """Whether a value is text that every database stores: not empty, at most ``limit``
    characters, without NUL and without half a surrogate pair."""
    if not isinstance(value, str) or not 0 < len(value) <= limit or "\x00" in value:
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def storable(value: Any, depth: int = 0) -> Any:
    """A header's value as the envelope's JSON can keep it and give it back; text instead of what
    it cannot keep."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, (datetime, date, time, Decimal, UUID)):
        return value
    if depth >= _DEEPEST:
        return f"({type(value).__name__})"
    if isinstance(value, Mapping):
        table = {str(name): storable(each, depth + 1) for name, each in value.items()}
        # What looks like kombu's mark for a type would be read as one, or not at all.
        return table if table.keys() != {"__type__", "__value__"} else repr(table)
    if isinstance(value, (list, tuple)):
        return [storable(each, depth + 1) for each in value]
    return repr(value)


def storable_properties(found: Any) -> dict[str, Any]:
    """Those properties of a message that matter when it is sent again."""
    properties: dict[str, Any] = {}
    if not isinstance(found, Mapping):
        return properties
    for name in ("correlation_id", "reply_to"):
        value = found.get(name)
        if is_storable(value, MAX_PROPERTY) and len(value.encode("utf-8")) <= MAX_PROPERTY:
            properties[name] = value
    for name, allowed in (("priority", range(256)), ("delivery_mode", range(1, 3))):
        if isinstance(found.get(name), int) and found[name] in allowed:
            properties[name] = found[name]
    return properties


def storable_body(body: Any) -> bytes | None:
    """The bytes of a body, whatever a transport hands over as one."""
    if body is None or isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    # Virtual transports have whatever the JSON of the message had.
    text = body if isinstance(body, str) else json.dumps(body, default=repr)
    return text.encode("utf-8", "surrogatepass")
