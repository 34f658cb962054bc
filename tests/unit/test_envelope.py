from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_outbox.store.envelope import Envelope
from tests.factories import new_envelope

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def through_the_database(envelope: Envelope) -> Envelope:
    return Envelope.from_json(envelope.to_json())


@pytest.mark.parametrize(
    "value",
    [
        "a\x00b",
        "\U0001f4c8 día \u2028",
        datetime(2026, 1, 31, 12, 0, 1, 5, tzinfo=timezone.utc),
        datetime(2026, 1, 31, 12, 0),
        uuid.UUID("12345678-1234-5678-1234-567812345678"),
        Decimal("1.10"),
        b"bytes",
        b"\xff\x00",
        {"nested": [1, None, {"deep": b"x"}]},
        10**30,
    ],
    ids=repr,
)
def test_a_header_keeps_its_value_and_type(value):
    envelope = through_the_database(new_envelope(headers={"id": "1", "value": value}))
    assert envelope.headers["value"] == value
    assert type(envelope.headers["value"]) is type(value)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON), st.dictionaries(st.text(), JSON))
def test_whatever_json_can_say_comes_back_as_it_was(headers, properties):
    envelope = new_envelope(headers=headers, properties=properties)
    assert through_the_database(envelope) == envelope


def test_the_text_has_no_nul_which_postgresql_does_not_store():
    assert "\x00" not in new_envelope(headers={"id": "a\x00b"}).to_json()


def test_every_part_of_the_message_is_kept():
    envelope = new_envelope(
        exchange="e",
        routing_key="r",
        queue="q",
        properties={"priority": 5, "delivery_mode": 2},
        content_type="application/x-yaml",
        content_encoding="utf-8",
        declare=[{"name": "q", "durable": True}],
    )
    assert through_the_database(envelope) == envelope


def test_what_a_newer_version_wrote_beside_is_ignored():
    stored = json.loads(new_envelope().to_json()) | {"of_the_future": 1}
    assert Envelope.from_json(json.dumps(stored)) == new_envelope()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}", '{"exchange": "e"}'])
def test_what_is_no_envelope_raises_what_the_dispatcher_catches(text):
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Envelope.from_json(text)
