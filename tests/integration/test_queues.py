"""The queues that ``outbox.queue`` describes, as RabbitMQ takes them."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_outbox import Outbox
from celery_outbox.queues import consumes_quorum_queues
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually

DEFAULT = "quorum" if consumes_quorum_queues() else "classic"


def make(rabbitmq_url: str, **settings: Any) -> Outbox:
    """An outbox for which no server but the broker is needed."""
    app = Celery("shop", broker=rabbitmq_url, task_cls="celery_outbox:OutboxTask")
    app.conf.update(outbox_database_url="sqlite://", **settings)
    return Outbox(app)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, DEFAULT),
        ({"queue_arguments": {"x-max-length": 9}}, DEFAULT),
        ({"queue_arguments": {"x-queue-type": "quorum"}}, "quorum"),
        ({"queue_arguments": {"x-queue-type": "classic"}}, "classic"),
        ({"queue_arguments": {"x-max-priority": 5}}, "classic"),
        ({"queue_arguments": {"x-queue-mode": "lazy"}}, "classic"),
        ({"max_priority": 5}, "classic"),
        ({"auto_delete": True}, "classic"),
        ({"exclusive": True}, "classic"),
        ({"durable": False}, "classic"),
    ],
    ids=str,
)
def test_rabbitmq_takes_the_queue_and_dead_letters_what_it_rejects(
    options: dict[str, Any], kind: str, rabbitmq_url: str
) -> None:
    outbox = make(rabbitmq_url)
    queue = outbox.queue("work", **options)

    assert queue.queue_arguments.get("x-queue-type", "classic") == kind
    with Connection(rabbitmq_url) as connection, connection.channel() as channel:
        outbox.quarantine_queue(channel).declare()
        bound = queue(channel)
        bound.declare()
        connection.Producer(channel).publish("rejected", routing_key="work")
        message = eventually(bound.get)
        message.reject(requeue=False)
        copy = eventually(outbox.quarantine_queue(channel).get)
        copy.ack()
    assert copy.payload == "rejected"


def test_rabbitmq_takes_the_queues_that_celery_gives_priorities(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi
) -> None:
    outbox = make(rabbitmq_url, task_queue_max_priority=5)
    outbox.app.conf.task_queues = [outbox.queue("work")]

    declared = outbox.app.amqp.queues["work"]
    assert declared.queue_arguments["x-max-priority"] == 5
    assert outbox.broker_dead_letters("work")
    with Connection(rabbitmq_url) as connection, connection.channel() as channel:
        declared(channel).declare()
        outbox.quarantine_queue(channel).declare()
    assert rabbitmq_api.kind("work") == "classic"
    assert rabbitmq_api.kind("outbox.quarantine") == DEFAULT
