"""The bytes of a message are those that py-amqp would write."""

from __future__ import annotations

import struct
import tracemalloc
from datetime import datetime, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import Message, spec
from amqp.exceptions import FrameSyntaxError
from amqp.method_framing import frame_writer
from amqp.serialization import dumps
from hypothesis import example, given
from hypothesis import strategies as st

from celery_outbox.dispatch.frames import publish_frames
from celery_outbox.dispatch.wire import Wire

#: The smallest size that a broker may ask for (AMQP 0-9-1, section 4.2.3), and RabbitMQ's.
FRAME_SIZES = [4096, 131072]

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
    | st.binary(max_size=20)
    | st.decimals(-1000, 1000, places=2)
    | st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1))
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
headers = st.dictionaries(st.text(max_size=20), values, max_size=8)
short = st.text(max_size=50)
properties = st.fixed_dictionaries(
    {},
    optional={
        "delivery_mode": st.sampled_from([1, 2, None]),
        "priority": st.integers(0, 255),
        "correlation_id": short,
        "reply_to": st.none() | short,
        "expiration": short,
        "message_id": short,
        "timestamp": st.integers(0, 2**60),
        "type": short,
        "user_id": short,
        "app_id": short,
        "cluster_id": short,
        "unknown_to_amqp": plain,
    },
)


def wire_of(**given: Any) -> Wire:
    options: dict[str, Any] = {
        "id": 1,
        "exchange": "",
        "routing_key": "celery",
        "body": b"[[], {}, {}]",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {},
        "properties": {},
    }
    return Wire(**{**options, **given})


def as_py_amqp(wire: Wire, channel: int, frame_max: int) -> bytes:
    """What py-amqp's channel writes for ``basic_publish(..., mandatory=True)``."""
    written: list[bytes] = []
    connection = SimpleNamespace(frame_max=frame_max, bytes_sent=0)
    transport = SimpleNamespace(write=lambda data: written.append(bytes(data)))
    message = Message(
        wire.body,
        content_type=wire.content_type,
        content_encoding=wire.content_encoding,
        application_headers=wire.headers,
        **wire.properties,
    )
    arguments = dumps("Bssbb", (0, wire.exchange, wire.routing_key, True, False))
    write = frame_writer(connection, transport)
    write(1, channel, spec.Basic.Publish, arguments, message)
    return b"".join(written)


@given(
    headers=headers,
    properties=properties,
    exchange=short,
    routing_key=short,
    channel=st.integers(1, 65535),
)
@example(
    headers={"no": 0, "false": False, "one": 1, "true": True, "float": 1.0, "text": "1"},
    properties={},
    exchange="",
    routing_key="celery",
    channel=1,
)
@example(
    headers={"a": [True], "b": [1], "c": [1.0], "d": {"x": None}, "e": -0.0, "f": 0.0},
    properties={},
    exchange="",
    routing_key="celery",
    channel=1,
)
@example(
    headers={
        "a": Decimal("1.50"),
        "b": Decimal("1.5"),
        "c": datetime(2026, 1, 1, tzinfo=timezone.utc),
    },
    properties={"priority": 0, "delivery_mode": 2},
    exchange="",
    routing_key="celery",
    channel=1,
)
def test_they_are_the_same_whatever_the_message_says(
    headers: dict[str, Any],
    properties: dict[str, Any],
    exchange: str,
    routing_key: str,
    channel: int,
) -> None:
    wire = wire_of(
        headers=headers, properties=properties, exchange=exchange, routing_key=routing_key
    )
    expected = as_py_amqp(wire, channel, 131072)
    assert publish_frames(wire, channel, 131072) == expected
    # What is remembered of the first one is right for the second.
    assert publish_frames(wire, channel, 131072) == expected


@pytest.mark.parametrize("frame_max", FRAME_SIZES)
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_a_large_body_is_sent_in_frames_that_the_connection_permits(
    frame_max: int, over: int
) -> None:
    for frames in (1, 3):
        wire = wire_of(body=b"x" * (frames * (frame_max - 8) + over))
        assert publish_frames(wire, 1, frame_max) == as_py_amqp(wire, 1, frame_max)


def test_an_empty_body_has_no_frame_of_its_own() -> None:
    sent = publish_frames(wire_of(body=b""), 1, 131072)
    # Two frames, each ended by its octet: method and header.
    assert sent.count(b"\xce") == 2
    assert struct.unpack_from(">Q", sent, sent.index(b"\xce") + 1 + 7 + 4)[0] == 0


def test_large_headers_that_differ_are_not_kept() -> None:
    # Of names that the caches know.
    publish_frames(wire_of(headers={"baggage": {"is": 0}}), 1, 131072)
    tracemalloc.start()
    for number in range(100):
        publish_frames(wire_of(headers={"baggage": {"is": f"{number}" * 20_000}}), 1, 131072)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


@pytest.mark.parametrize(
    "broken",
    [
        {"headers": {"x": object()}},
        {"headers": {"x" * 256: 1}},
        {"headers": {"x": 2**63}},
        {"headers": {"x": {"y": [object()]}}},
        {"properties": {"correlation_id": "x" * 256}},
        {"properties": {"priority": 256}},
        {"properties": {"priority": "high"}},
        {"properties": {"delivery_mode": None, "timestamp": -1}},
        {"routing_key": "x" * 256},
    ],
    ids=lambda broken: "-".join(broken),
)
def test_what_py_amqp_cannot_encode_is_refused_as_by_it(broken: dict[str, Any]) -> None:
    errors = (FrameSyntaxError, struct.error, TypeError, ValueError, OverflowError)
    with pytest.raises(errors):
        as_py_amqp(wire_of(**broken), 1, 131072)
    with pytest.raises(errors):
        publish_frames(wire_of(**broken), 1, 131072)
