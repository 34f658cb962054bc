"""Brokers that are away, refuse everybody or do not answer: nothing is parked, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from kombu.utils import functional
from redis import Redis as Client

from celery_outbox import Outbox
from celery_outbox.dispatch.amqp import AmqpPublisher
from tests.factories import Database, add_task, open_outbox
from tests.proxy import Proxy
from tests.servers.rabbitmq import RabbitmqApi
from tests.servers.redis import Redis
from tests.wait import eventually
from tests.watchdog import Watchdog

pytestmark = pytest.mark.once

ATTEMPTS = 1000


@pytest.fixture
def own_redis(watchdog: Watchdog) -> Iterator[str]:
    """The URL of a server of this test's own, whose configuration it may spoil."""
    server = Redis.start(watchdog, private=True)
    yield server.fresh_database()
    server.stop()


@pytest.mark.parametrize("broker", ["rabbitmq_url", "redis_url"])
def test_a_thousand_failed_connections_park_nothing_and_all_is_published_afterwards(
    request: pytest.FixtureRequest,
    sqlite_installed_url: str,
    broker: str,
    proxy_to: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # kombu tries each time once more, two seconds later.
    monkeypatch.setattr(functional, "sleep", lambda seconds: None)
    url = request.getfixturevalue(broker)
    proxy = proxy_to(url)
    proxy.cut()
    settings = {"broker_url": proxy.url_for(url)}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        job_ids = _record(outbox, 3)
        recorded = Database(outbox.engine, outbox.tables)
        dispatcher = outbox.dispatcher()

        for _ in range(ATTEMPTS):
            done = dispatcher.dispatch_batch()
            assert (done.claimed, done.published, done.refused) == (3, 0, 0)
            assert done.outage is not None

        for job_id in job_ids:
            job = recorded.job(job_id)
            assert (job.state, job.attempt, job.published_at) == ("queued", 0, None)
            assert recorded.events(job_id) == ["recorded"]
        assert len(recorded.messages()) == 3
        assert all(
            message.due_at <= recorded.job(job_ids[0]).now for message in recorded.messages()
        )
        proxy.resume()
        assert dispatcher.dispatch_batch().published == 3
        assert recorded.messages() == []
        dispatcher.close()


@pytest.mark.parametrize("ends", [True, False], ids=["the connection ends", "silence"])
def test_a_row_whose_confirm_did_not_come_stays_due(
    sqlite_installed_url: str,
    rabbitmq_api: RabbitmqApi,
    proxy_to: Callable[[str], Proxy],
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
) -> None:
    proxy = proxy_to(rabbitmq_api.url)
    settings = {"broker_url": proxy.url_for(rabbitmq_api.url), "outbox_publish_timeout": 2.0}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        dispatcher = outbox.dispatcher()
        _record(outbox, 1)
        assert dispatcher.dispatch_batch().published == 1
        publisher = dispatcher._publisher
        assert isinstance(publisher, AmqpPublisher)
        drain = publisher._drain

        def lose_the_confirm() -> None:
            """Wait for what the broker has sent, and this side does not get."""
            eventually(lambda: rabbitmq_api.depth("celery") == 4)
            if ends:
                proxy.cut()
            drain()

        monkeypatch.setattr(publisher, "_drain", lose_the_confirm)
        _record(outbox, 3)
        proxy.withhold_answers()
        done = dispatcher.dispatch_batch()
        assert (done.claimed, done.published, done.refused) == (3, 0, 0)
        assert done.outage is not None
        waiting = recorded.messages()
        assert [message.claimed_by for message in waiting] == [None] * 3
        assert all(message.due_at <= recorded.job(message.job_id).now for message in waiting)

        monkeypatch.undo()
        proxy.resume()
        assert dispatcher.dispatch_batch().published == 3
        assert recorded.messages() == []
        # One more message for each row of the batch, and the guard makes that harmless.
        assert rabbitmq_api.depth("celery") == 1 + 2 * 3
        dispatcher.close()


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    ],
    ids=["out of memory", "read-only replica"],
)
def test_a_redis_that_refuses_every_write_is_an_outage_and_not_the_messages_fault(
    sqlite_installed_url: str, own_redis: str, spoil: tuple[str, ...], mend: tuple[str, ...]
) -> None:
    with (
        open_outbox(sqlite_installed_url, init=False, broker_url=own_redis) as outbox,
        Client.from_url(own_redis) as client,
    ):
        first, second = _record(outbox, 2)
        dispatcher = outbox.dispatcher()
        client.execute_command(*spoil)

        done = dispatcher.dispatch_batch()

        assert (done.claimed, done.published, done.refused) == (2, 0, 0)
        assert done.outage is not None
        assert {outbox.job(first).state, outbox.job(second).state} == {"queued"}
        client.execute_command(*mend)
        assert dispatcher.dispatch_batch().published == 2
        assert client.llen("celery") == 2
        dispatcher.close()


def test_a_redis_that_stalls_is_an_outage_within_the_timeout_and_used_again_afterwards(
    sqlite_installed_url: str, redis_url: str, proxy_to: Callable[[str], Proxy]
) -> None:
    proxy = proxy_to(redis_url)
    settings = {"broker_url": proxy.url_for(redis_url), "outbox_publish_timeout": 1.0}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        dispatcher = outbox.dispatcher()
        _record(outbox, 1)
        assert dispatcher.dispatch_batch().published == 1
        _record(outbox, 1)

        proxy.stall()
        done = dispatcher.dispatch_batch()
        assert (done.claimed, done.published, done.outage is None) == (1, 0, False)
        proxy.resume()

        eventually(lambda: dispatcher.dispatch_batch().published == 1)
        dispatcher.close()


def test_a_dispatcher_goes_on_through_a_memory_alarm_without_a_restart(
    sqlite_installed_url: str, blockable_vhost: tuple[str, Callable[[float], None]]
) -> None:
    url, limit_memory = blockable_vhost
    settings = {"broker_url": url, "outbox_publish_timeout": 2.0}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        dispatcher = outbox.dispatcher()
        _record(outbox, 1)
        assert dispatcher.dispatch_batch().published == 1
        before = dispatcher._publisher._connection  # type: ignore[union-attr]
        assert before is not None
        job_ids = _record(outbox, 3)

        limit_memory(0)
        for _ in range(2):
            done = dispatcher.dispatch_batch()
            assert (done.claimed, done.published, done.refused) == (3, 0, 0)
            assert done.outage is not None
        assert {outbox.job(job_id).published_at for job_id in job_ids} == {None}
        limit_memory(0.4)

        eventually(lambda: dispatcher.dispatch_batch().published == 3)
        after = dispatcher._publisher._connection  # type: ignore[union-attr]
        assert after is not None
        assert after is not before
        dispatcher.close()


def _record(outbox: Outbox, count: int) -> list[str]:
    task = outbox.app.tasks.get("shop.export") or add_task(outbox.app)
    return [task.delay().id for _ in range(count)]
