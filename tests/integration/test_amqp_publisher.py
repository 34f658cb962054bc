"""What RabbitMQ answers is told apart, message by message."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_outbox.dispatch.amqp import AmqpPublisher
from celery_outbox.dispatch.frames import publish_frames
from celery_outbox.dispatch.publisher import Outcome
from celery_outbox.dispatch.wire import Wire
from tests.proxy import Proxy
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually

#: Larger than RabbitMQ's default limit of 128 MiB.
OVERSIZE = 129 * 1024 * 1024


def wire(number: int, queue: str = "work", body: bytes = b"[]", **headers: Any) -> Wire:
    """A message for the default exchange."""
    return Wire(
        id=number,
        exchange="",
        routing_key=queue,
        body=body,
        content_type="application/json",
        content_encoding="utf-8",
        headers=headers,
        properties={"correlation_id": f"job-{number}", "delivery_mode": 2},
    )


@pytest.fixture
def publisher(rabbitmq_url: str, rabbitmq_api: RabbitmqApi) -> Iterator[AmqpPublisher]:
    """A publisher, and a queue named ``work``."""
    rabbitmq_api.declare("work")
    publisher = AmqpPublisher(Celery(broker=rabbitmq_url), window=100, timeout=10.0)
    yield publisher
    publisher.close()


def test_a_thousand_messages_are_confirmed(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    report = publisher.publish([wire(number) for number in range(1000)])

    assert report.outage is None
    assert set(report.outcomes.values()) == {Outcome.CONFIRMED}
    assert len(report.outcomes) == rabbitmq_api.depth("work") == 1000


def test_an_unroutable_message_is_told_from_its_neighbours(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    report = publisher.publish([wire(1), wire(2, queue="nowhere"), wire(3)])

    assert report.outcomes == {
        1: Outcome.CONFIRMED,
        2: Outcome.UNROUTABLE,
        3: Outcome.CONFIRMED,
    }
    assert rabbitmq_api.depth("work") == 2


def test_a_missing_exchange_does_not_take_its_neighbours_along(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    lost = wire(2)
    lost.exchange = "no-such-exchange"

    report = publisher.publish([wire(1), lost, wire(3)])

    assert report.outage is None
    assert report.outcomes == {
        1: Outcome.CONFIRMED,
        2: Outcome.UNROUTABLE,
        3: Outcome.CONFIRMED,
    }


def test_a_full_queue_refuses_and_the_message_is_not_confirmed(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    rabbitmq_api.declare("full", **{"x-max-length": 1, "x-overflow": "reject-publish"})

    report = publisher.publish([wire(1, "full"), wire(2, "full"), wire(3)])

    assert report.outcomes[1] is Outcome.CONFIRMED
    assert report.outcomes[2] is Outcome.NACKED
    assert report.outcomes[3] is Outcome.CONFIRMED
    assert rabbitmq_api.depth("full") == 1


def test_an_oversize_message_is_isolated_and_its_neighbours_are_published(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    report = publisher.publish([wire(1), wire(2, body=b"x" * OVERSIZE), wire(3)])

    assert report.outage is None
    assert report.outcomes == {
        1: Outcome.CONFIRMED,
        2: Outcome.TOO_LARGE,
        3: Outcome.CONFIRMED,
    }


def test_headers_larger_than_a_frame_are_the_messages_fault_and_not_an_outage(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    report = publisher.publish([wire(1), wire(2, big="x" * 200_000), wire(3)])

    assert report.outage is None
    assert report.outcomes == {
        1: Outcome.CONFIRMED,
        2: Outcome.UNPUBLISHABLE,
        3: Outcome.CONFIRMED,
    }


def test_a_header_that_amqp_cannot_hold_is_unpublishable(publisher: AmqpPublisher) -> None:
    report = publisher.publish([wire(1), wire(2, strange=object()), wire(3)])

    assert report.outcomes == {
        1: Outcome.CONFIRMED,
        2: Outcome.UNPUBLISHABLE,
        3: Outcome.CONFIRMED,
    }


@pytest.mark.parametrize("options", [{}, {"confirm_publish": False}, {"confirm_publish": True}])
def test_confirms_are_on_whatever_the_configuration_says(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi, options: dict[str, bool]
) -> None:
    rabbitmq_api.declare("work")
    app = Celery(broker=rabbitmq_url)
    app.conf.broker_transport_options = options
    publisher = AmqpPublisher(app, window=1, timeout=10.0)

    report = publisher.publish([wire(number) for number in range(5)])
    publisher.close()

    assert list(report.outcomes.values()) == [Outcome.CONFIRMED] * 5


def test_a_queue_that_exists_with_other_arguments_still_gets_messages(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi
) -> None:
    rabbitmq_api.declare("work", **{"x-max-length": 10})
    app = Celery(broker=rabbitmq_url)
    app.conf.task_queues = [Queue("work", Exchange("work"), routing_key="work")]
    publisher = AmqpPublisher(app, window=10, timeout=10.0)
    message = wire(1)
    message.queue = "work"

    report = publisher.publish([message])
    publisher.close()

    assert report.outcomes == {1: Outcome.CONFIRMED}


def test_a_broker_that_is_away_decides_nothing(rabbitmq_url: str) -> None:
    app = Celery(broker="amqp://guest:guest@127.0.0.1:1//")
    publisher = AmqpPublisher(app, window=10, timeout=1.0)

    report = publisher.publish([wire(1), wire(2)])

    assert report.outcomes == {}
    assert report.outage is not None


def test_a_stalled_broker_is_an_outage_within_the_timeout_and_used_again_afterwards(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi, proxy_to: Callable[[str], Proxy]
) -> None:
    rabbitmq_api.declare("work")
    proxy = proxy_to(rabbitmq_url)
    publisher = AmqpPublisher(Celery(broker=proxy.url_for(rabbitmq_url)), window=10, timeout=1.0)
    assert publisher.publish([wire(1)]).outcomes == {1: Outcome.CONFIRMED}

    proxy.stall()
    report = publisher.publish([wire(2)])
    assert (report.outcomes, report.outage is None) == ({}, False)
    proxy.resume()

    eventually(lambda: publisher.publish([wire(3)]).outcomes == {3: Outcome.CONFIRMED})
    publisher.close()


def test_a_broker_that_stalls_in_the_middle_of_an_answer_is_an_outage(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi, proxy_to: Callable[[str], Proxy]
) -> None:
    rabbitmq_api.declare("work")
    proxy = proxy_to(rabbitmq_url)
    publisher = AmqpPublisher(Celery(broker=proxy.url_for(rabbitmq_url)), window=10, timeout=1.0)
    assert publisher.publish([wire(1)]).outcomes == {1: Outcome.CONFIRMED}

    # Behind the first seven, which say how many more there will be.
    proxy.break_off_answer(after=10)
    connection = publisher._connection.connection
    # Its confirm is what is broken off, and there before anything else is sent.
    connection.transport.write(publish_frames(wire(2), publisher._channel.channel_id, 131072))
    assert select.select([connection.sock], [], [], 60)[0]
    report = publisher.publish([wire(3)])
    assert (report.outcomes, report.outage is None) == ({}, False)

    proxy.resume()
    eventually(lambda: publisher.publish([wire(4)]).outcomes == {4: Outcome.CONFIRMED})
    publisher.close()


def test_a_connection_cut_between_publish_and_confirm_decides_nothing(
    rabbitmq_url: str,
    rabbitmq_api: RabbitmqApi,
    proxy_to: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rabbitmq_api.declare("work")
    proxy = proxy_to(rabbitmq_url)
    publisher = AmqpPublisher(Celery(broker=proxy.url_for(rabbitmq_url)), window=10, timeout=1.0)
    publisher.publish([wire(1)])
    drain = publisher._drain

    def cut_first() -> None:
        """Read the confirm, which is there and cannot come any more."""
        eventually(lambda: rabbitmq_api.depth("work") == 2)
        proxy.cut()
        drain()

    proxy.withhold_answers()
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_drain", cut_first)
        report = publisher.publish([wire(2)])
    proxy.resume()

    assert (report.outcomes, report.outage is None) == ({}, False)
    assert publisher.publish([wire(2)]).outcomes == {2: Outcome.CONFIRMED}
    assert rabbitmq_api.depth("work") == 3
    publisher.close()


def test_the_queue_for_the_answer_is_there_before_the_message(
    rabbitmq_url: str, rabbitmq_api: RabbitmqApi
) -> None:
    """Celery's backend ``rpc://`` declares it at the call, which connects to nothing here."""
    app = Celery(broker=rabbitmq_url, backend="rpc://")
    publisher = AmqpPublisher(app, window=100, timeout=10.0)
    rabbitmq_api.declare("work")
    calls = [wire(1, parent_id=None), wire(2, parent_id=None), wire(3, parent_id="job-1")]
    for call, caller in zip(calls, (app.thread_oid, app.thread_oid, "worker"), strict=True):
        call.properties["reply_to"] = caller

    for call in calls:
        publisher.publish([call])
    publisher.close()

    # A job's own calls have none: nobody waits in a worker.
    assert rabbitmq_api.queues() == sorted(["work", app.thread_oid])
    rabbitmq_api.publish(app.thread_oid, {"task_id": "job-1", "status": "SUCCESS", "result": 7})
    # The caller looks only now, and declares it in the same way.
    with app.connection_for_read() as connection, connection.channel() as channel:
        app.backend.binding(channel).declare()
    assert rabbitmq_api.depth(app.thread_oid) == 1


def test_other_result_backends_have_no_queue_for_answers(
    publisher: AmqpPublisher, rabbitmq_api: RabbitmqApi
) -> None:
    call = wire(1, parent_id=None)
    call.properties["reply_to"] = "caller"

    publisher.publish([call])

    assert rabbitmq_api.queues() == ["work"]
