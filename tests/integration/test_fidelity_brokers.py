"""On real brokers a dispatcher's message is stock Celery's, but for the list of differences."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue
from kombu.serialization import loads, prepare_accept_content
from sqlalchemy import update

from celery_outbox import Outbox
from celery_outbox.execute.payload import decode_call
from celery_outbox.store.clock import db_after
from tests.factories import Database, add_task, make_app, make_stock_app, open_database
from tests.integration.calls import NOW, TASK, Call
from tests.integration.differences import as_claim_check
from tests.integration.spy_transport import Published
from tests.wait import eventually

TENANT = Queue("tenant", Exchange("tenants", type="topic"), "tenant.#", max_priority=9)
SHORT = Queue("short", Exchange("short", durable=False), "k", expires=600, max_length=9)

#: By the queue that the message ends in.
CALLS: list[tuple[str, Call]] = [
    ("celery", Call(["é", 1.5, None], {"period": b"\xff"})),
    ("reports", Call([1], options={"queue": "reports", "priority": 7})),
    ("tenant", Call([1], options={"queue": TENANT, "routing_key": "tenant.7", "priority": 3})),
    ("short", Call([1], options={"queue": SHORT, "delivery_mode": 1})),
    ("celery", Call([2], options={"eta": NOW + timedelta(hours=1), "expires": 7200})),
    ("celery", Call([3], options={"countdown": 3600, "serializer": "pickle"})),
    ("celery", Call(["x" * 5000], options={"compression": "zlib", "shadow": "other"})),
    (
        "celery",
        Call(
            [4],
            options={"headers": {"nested": {"a": [1, None, True, "é"]}, "when": NOW, "big": 2**40}},
        ),
    ),
    (
        "celery",
        Call([5], links={"link": [1, 2], "link_error": 3, "chain": [4, 5], "chord": 6}),
    ),
    ("celery", Call([6], options={"time_limit": 9, "soft_time_limit": 8}, visitor=True)),
    (
        "celery",
        Call(
            [7],
            options={
                "reply_to": "answers",
                "correlation_id": "other",
                "message_id": "m",
                "app_id": "shop",
                "type": "kind",
                "timestamp": 1_770_000_000,
            },
        ),
    ),
    ("celery", Call([8], receiver="properties")),
]


@pytest.fixture(params=["rabbitmq", "redis"])
def broker_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def database(sqlite_url: str) -> Iterator[Database]:
    with open_database(sqlite_url) as database:
        yield database


def prepare(app: Celery) -> None:
    """Make an app that calls are made in, at the moment of the calls."""
    app.now = lambda: NOW.astimezone(app.timezone)
    app._local.oid = "reply-queue"
    add_task(app, name=TASK)
    add_task(app, name="shop.notify")


#: What a client of the broker adds to the properties of a message that it has received.
BESIDE = {
    "delivery_info",
    "delivery_tag",
    "body_encoding",
    "application_headers",
    "content_type",
    "content_encoding",
}


def take(app: Celery, queue: str) -> Published:
    """Take a message out of a queue."""
    with app.connection_for_read() as connection, connection.channel() as channel:
        message = channel.message_to_python(
            eventually(lambda: channel.basic_get(queue, no_ack=True))
        )
        body = message.body
        return Published(
            exchange=message.delivery_info["exchange"],
            routing_key=message.delivery_info["routing_key"],
            headers=message.headers,
            properties={k: v for k, v in message.properties.items() if k not in BESIDE},
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            body=body.encode() if isinstance(body, str) else bytes(body),
        )


def test_what_a_broker_gets_is_the_message_of_stock_celery(database, broker_url):
    conf: dict[str, Any] = {"broker_url": broker_url, "accept_content": ["json", "pickle"]}
    stock, ours = make_stock_app(**conf), make_app(**conf)
    outbox = Outbox(ours, engine=database.engine)
    prepare(stock)
    prepare(ours)
    message = database.tables.message
    for queue, call in CALLS:
        database.empty()
        call.make(stock)
        expected = take(stock, queue)
        call.make(ours)
        job = database.job("job-1")
        sent = loads(
            expected.body,
            expected.content_type,
            expected.content_encoding,
            accept=prepare_accept_content(["json", "pickle"]),
        )
        assert decode_call(ours, job) == tuple(sent)
        database.execute(update(message).values(due_at=db_after(-1)))
        assert outbox.dispatcher().drain().published == 1
        assert take(ours, queue) == as_claim_check(expected, call.options), call
    ours.close()
    stock.close()
