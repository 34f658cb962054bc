from __future__ import annotations

import json

import celery
import pytest
from celery import signals
from kombu import Exchange, Queue
from kombu.compression import decompress
from kombu.serialization import loads, prepare_accept_content

from celery_outbox.record.capture import RecordingProducer
from tests.factories import add_task, capture, make_app


@pytest.fixture
def app() -> celery.Celery:
    return make_app()


def test_the_body_is_the_one_that_celery_makes(app):
    envelope, body = capture(app, 42, "a\x00b", kwargs={"period": "2026-01"})
    args, kwargs, embed = json.loads(body)
    assert (args, kwargs) == ([42, "a\x00b"], {"period": "2026-01"})
    assert set(embed) == {"callbacks", "errbacks", "chain", "chord"}
    assert (envelope.content_type, envelope.content_encoding) == ("application/json", "utf-8")


def test_headers_and_properties_are_celerys(app):
    envelope, _ = capture(app, task_id="export-42")
    assert envelope.headers["id"] == envelope.headers["root_id"] == "export-42"
    assert envelope.headers["task"] == "shop.export"
    assert envelope.properties["correlation_id"] == "export-42"
    assert envelope.properties["delivery_mode"] == 2


def test_an_ordinary_call_goes_to_the_default_queue(app):
    envelope, _ = capture(app)
    assert (envelope.queue, envelope.routing_key) == ("celery", "celery")
    assert envelope.declare == []


def test_routing_options_are_kept(app):
    app.conf.task_queues = [Queue("reports", Exchange("shop", type="topic"), "reports.#")]
    envelope, _ = capture(app, queue="reports", routing_key="reports.daily", priority=7)
    assert (envelope.exchange, envelope.routing_key) == ("shop", "reports.daily")
    assert envelope.queue == "reports"
    assert envelope.properties["priority"] == 7


def test_an_exchange_of_the_call_is_kept(app):
    envelope, _ = capture(app, exchange="events", routing_key="order.created")
    assert (envelope.exchange, envelope.routing_key) == ("events", "order.created")


def test_routes_of_the_configuration_apply(app):
    app.conf.task_routes = {"shop.*": {"queue": "exports", "priority": 3}}
    envelope, _ = capture(app)
    assert (envelope.queue, envelope.properties["priority"]) == ("exports", 3)


@pytest.mark.parametrize(("mode", "stored"), [("transient", 1), (1, 1), ("persistent", 2), (2, 2)])
def test_the_delivery_mode_is_kept(app, mode, stored):
    envelope, _ = capture(app, delivery_mode=mode)
    assert envelope.properties["delivery_mode"] == stored


@pytest.mark.parametrize("compression", ["gzip", "bzip2"])
def test_the_body_is_compressed_as_asked(app, compression):
    envelope, body = capture(app, "x" * 5000, compression=compression)
    assert len(body) < 1000
    args, _, _ = json.loads(decompress(body, envelope.headers["compression"]))
    assert args == ["x" * 5000]


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_the_body_is_serialized_as_asked(app, serializer):
    envelope, body = capture(app, 1, serializer=serializer)
    accept = prepare_accept_content([serializer])
    args, _, _ = loads(body, envelope.content_type, envelope.content_encoding, accept=accept)
    assert list(args) == [1]
    assert isinstance(body, bytes)


def test_a_queue_that_only_the_call_knows_is_described_for_the_dispatcher(app):
    queue = Queue(
        "tenant-7",
        Exchange("tenants", type="topic"),
        "tenant.7",
        queue_arguments={"x-max-length": 10},
        max_priority=9,
        auto_delete=True,
    )
    envelope, _ = capture(app, queue=queue)
    assert (envelope.queue, envelope.exchange, envelope.routing_key) == (
        "tenant-7",
        "tenants",
        "tenant.7",
    )
    [described] = envelope.declare
    assert (described["name"], described["exchange"]["type"]) == ("tenant-7", "topic")
    assert described["queue_arguments"] == {"x-max-length": 10}
    assert (described["max_priority"], described["auto_delete"]) == (9, True)
    envelope.to_json()


def test_the_task_sent_event_is_not_taken_for_the_message(app):
    app.conf.task_send_sent_event = True
    envelope, body = capture(app, 42)
    assert envelope.headers["task"] == "shop.export"
    assert json.loads(body)[0] == [42]


def test_a_second_message_of_one_call_is_noticed():
    producer = RecordingProducer()
    producer.publish([], routing_key="celery", serializer="json")
    with pytest.raises(AssertionError, match="twice"):
        producer.publish([], routing_key="celery", serializer="json")


def test_a_call_that_published_nothing_is_noticed():
    with pytest.raises(AssertionError, match="nothing"):
        RecordingProducer().captured({})


def test_what_receivers_of_before_task_publish_change_is_in_the_message(app):
    task = add_task(app, name="shop.traced")

    def trace(headers, properties, body, **_):
        headers["traceparent"] = "00-1-2-01"
        properties["priority"] = 4
        body[0][:] = [43]

    signals.before_task_publish.connect(trace, sender="shop.traced")
    try:
        envelope, body = capture(app, 42, task=task)
    finally:
        signals.before_task_publish.disconnect(trace, sender="shop.traced")
    assert envelope.headers["traceparent"] == "00-1-2-01"
    assert envelope.properties["priority"] == 4
    assert json.loads(body)[0] == [43]


def test_links_groups_and_stamps_are_in_the_message(app):
    task = add_task(app, name="shop.notify")
    envelope, body = capture(
        app, 1, link=task.s("done"), link_error=task.s("failed"), group_id="g", group_index=2
    )
    embed = json.loads(body)[2]
    assert [each["args"] for each in embed["callbacks"]] == [["done"]]
    assert [each["args"] for each in embed["errbacks"]] == [["failed"]]
    assert (envelope.headers["group"], envelope.headers["group_index"]) == ("g", 2)


def test_time_limits_and_expiry_are_in_the_headers(app):
    envelope, _ = capture(app, time_limit=9, soft_time_limit=8, expires=60, shadow="export")
    assert envelope.headers["timelimit"] == [9, 8]
    assert envelope.headers["expires"]
    assert envelope.headers["shadow"] == "export"
