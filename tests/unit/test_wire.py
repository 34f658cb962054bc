from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from kombu import Exchange, Queue
from kombu.serialization import loads, prepare_accept_content

from celery_outbox.core.states import State
from celery_outbox.dispatch.wire import MESSAGE_VERSION, Wire, build
from celery_outbox.store.messages import QUARANTINE, Message
from tests.factories import capture, make_app, new_envelope, new_message

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)
QUARANTINE_QUEUE = Queue("outbox.quarantine", Exchange("outbox.quarantine"), "outbox.quarantine")
SECRET = "s3cret-argument"


def wire(message: Message, accepts_json: bool = True) -> Wire:
    return build(message, QUARANTINE_QUEUE, accepts_json)


def captured(**values) -> Message:
    """Return the row of a call with an argument that nobody else may see."""
    options = values.pop("options", {})
    envelope, body = capture(
        make_app(),
        SECRET,
        kwargs={"token": SECRET},
        argsrepr="(...)",
        kwargsrepr="(...)",
        task_id="job-1",
        **options,
    )
    return new_message(envelope_json=envelope.to_json(), body=body, **values)


@pytest.mark.parametrize("kind", ["task", QUARANTINE])
def test_a_claim_check_has_no_arguments_anywhere(kind):
    sent = wire(captured(kind=kind, reason="permanent"))
    assert SECRET not in repr(sent)
    assert loads(sent.body, sent.content_type, sent.content_encoding) == [[], {}, {}]


def test_a_claim_check_says_which_job_which_task_and_which_version():
    sent = wire(captured(attempt=2))
    assert sent.headers["id"] == sent.properties["correlation_id"] == "job-1"
    assert sent.headers["task"] == "shop.export"
    assert sent.headers["outbox_version"] == MESSAGE_VERSION
    assert sent.headers["retries"] == 2


def test_a_claim_check_leaves_time_to_the_database():
    options = {"countdown": 60, "expires": 120}
    sent = wire(captured(options=options, expires_at=NOW + timedelta(seconds=120)))
    assert "expiration" not in sent.properties
    assert "expires" not in sent.headers
    assert sent.headers["eta"] is None


def test_a_claim_check_goes_where_the_call_said():
    queue = Queue("tenant-7", Exchange("tenants", type="topic"), "tenant.7", max_priority=9)
    sent = wire(captured(options={"queue": queue, "priority": 7, "delivery_mode": 1}))
    assert (sent.exchange, sent.routing_key, sent.queue) == ("tenants", "tenant.7", "tenant-7")
    assert (sent.properties["priority"], sent.properties["delivery_mode"]) == (7, 1)
    [declared] = sent.declare
    assert (declared.name, declared.exchange.name, declared.exchange.type) == (
        "tenant-7",
        "tenants",
        "topic",
    )
    assert declared.max_priority == 9


def test_a_message_without_arguments_is_json_although_the_call_was_not():
    sent = wire(captured(options={"serializer": "pickle"}))
    assert sent.content_type == "application/json"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_where_workers_take_no_json_the_empty_body_has_the_content_type_of_the_call(serializer):
    message = captured(options={"serializer": serializer, "compression": "gzip"})
    sent = wire(message, accepts_json=False)
    accept = prepare_accept_content([serializer])
    assert loads(sent.body, sent.content_type, sent.content_encoding, accept=accept)
    assert "compression" not in sent.headers


def test_a_content_type_that_nobody_knows_any_more_is_sent_as_json():
    envelope = new_envelope(content_type="application/x-gone")
    assert wire(new_message(envelope_json=envelope.to_json())).content_type == "application/json"


def test_a_message_for_another_service_goes_out_in_full():
    message = captured(relay=True, options={"compression": "gzip", "priority": 3})
    sent = wire(message)
    assert sent.body == message.body
    assert sent.headers == message.envelope.headers
    assert sent.properties == message.envelope.properties
    assert sent.content_type == message.envelope.content_type
    assert "outbox_version" not in sent.headers


def test_a_message_for_another_service_has_what_is_left_of_its_time_to_live():
    options = {"expires": 120}
    message = captured(relay=True, options=options, now=NOW, expires_at=NOW + timedelta(seconds=30))
    sent = wire(message)
    assert sent.properties["expiration"] == "30000"
    assert sent.headers["expires"] == message.envelope.headers["expires"]
    late = captured(relay=True, options=options, now=NOW, expires_at=NOW - timedelta(seconds=1))
    assert wire(late).properties["expiration"] == "0"


def test_a_copy_says_why_the_job_is_in_quarantine():
    sent = wire(
        captured(
            kind=QUARANTINE,
            state=State.QUARANTINED,
            reason="attempts_exhausted",
            error_code="OSError",
            attempt=3,
            options={"queue": "exports", "priority": 9},
        )
    )
    assert (sent.exchange, sent.routing_key) == ("outbox.quarantine", "outbox.quarantine")
    assert sent.declare == [QUARANTINE_QUEUE]
    assert "priority" not in sent.properties
    told = {name: value for name, value in sent.headers.items() if name.startswith("x-outbox-")}
    assert told == {
        "x-outbox-job-id": "job-1",
        "x-outbox-reason": "attempts_exhausted",
        "x-outbox-error-code": "OSError",
        "x-outbox-attempt": 3,
        "x-outbox-queue": "exports",
    }


def test_a_copy_of_a_message_that_named_no_known_job_has_its_id_and_task():
    envelope = new_envelope(headers={}, properties={}, content_type="")
    sent = wire(new_message(kind=QUARANTINE, envelope_json=envelope.to_json()))
    assert (sent.headers["id"], sent.headers["task"]) == ("job-1", "shop.export")
    assert sent.properties["correlation_id"] == "job-1"


def test_headers_of_the_call_reach_the_worker():
    sent = wire(captured(options={"headers": {"traceparent": "00-1-2-01"}}))
    assert "traceparent" in json.dumps(sent.headers)


def test_a_row_that_cannot_be_read_raises_what_the_dispatcher_catches():
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        wire(new_message(envelope_json="{"))


def test_a_copy_leaves_out_what_a_broker_may_not_take():
    headers = {
        "id": "job-1",
        "task": "shop.export",
        "big": 2**70,
        "long": "x" * 100_000,
        "half": "a\ud800b",
        "x" * 300: 1,
        "when": NOW,
        "fine": {"é": [1, None, True, 0.5, "é"]},
    }
    row = new_message(kind=QUARANTINE, envelope_json=new_envelope(headers=headers).to_json())
    sent = wire(row)
    assert sent.headers["fine"] == {"é": [1, None, True, 0.5, "é"]}
    assert set(headers) & set(sent.headers) == {"id", "task", "fine"}


def test_a_copy_has_the_id_of_its_row_and_no_property_that_is_too_long():
    headers = {"id": 5, "task": ["no"]}
    envelope = new_envelope(headers=headers, properties={})
    job_id = "é" * 200
    sent = wire(new_message(kind=QUARANTINE, job_id=job_id, envelope_json=envelope.to_json()))
    assert (sent.headers["id"], sent.headers["task"]) == (job_id, "shop.export")
    assert "correlation_id" not in sent.properties
