"""The broker is away or silent: at the start, between delivery and ack, under a dispatcher."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.proxy import Proxy
from tests.wait import eventually

on_servers = pytest.mark.parametrize(
    "system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True
)


@pytest.fixture
def broker(system: System, proxy_to: Callable[[str], Proxy]) -> Proxy:
    """The way to the broker, for those processes that are started with :func:`through`."""
    return proxy_to(system.environment["SHOP_BROKER"])


def through(broker: Proxy, system: System) -> dict[str, str]:
    """The environment of a process that reaches the broker through the proxy."""
    return {"SHOP_BROKER": broker.url_for(system.environment["SHOP_BROKER"])}


@on_servers
def test_worker_and_dispatcher_start_without_a_broker_and_find_it_later(
    system: System, broker: Proxy
) -> None:
    broker.cut()
    system.shop.add.apply_async((1, 2), task_id="add-1")
    dispatcher = system.dispatcher(**through(broker, system))
    worker = system.worker(**through(broker, system))
    eventually(lambda: "outbox.dispatch_paused" in dispatcher.log())
    eventually(lambda: "Cannot connect to" in worker.log())
    assert (system.job("add-1").state, system.job("add-1").published_at) == ("queued", None)

    broker.resume()

    job = system.reaches("add-1", "succeeded", deadline=60)
    assert (job.attempt, system.runs("add-1")) == (1, 1)
    assert dispatcher.alive
    assert worker.alive


@pytest.mark.parametrize("pool", ["threads", "prefork"])
@on_rabbitmq
def test_work_that_was_finished_while_the_ack_was_impossible_is_not_done_again(
    system: System, broker: Proxy, pool: str
) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    worker = system.worker("-c", "2", pool=pool, **through(broker, system))
    system.reaches("slow", "running")

    broker.cut()
    (system.folder / "go").touch()
    first = system.reaches("slow", "succeeded")
    # The broker has it back, as it was never acknowledged.
    eventually(lambda: system.depth("celery") == 1)
    broker.resume()

    eventually(lambda: "duplicate" in system.events("slow"), deadline=60)
    eventually(lambda: system.depth("celery") == 0)
    after = system.job("slow")
    assert (after.attempt, after.deliveries, system.runs("slow")) == (1, 2, 1)
    assert (after.state, after.finished_at) == ("succeeded", first.finished_at)
    _runs_the_next(system)
    assert worker.alive


@on_rabbitmq
def test_a_copy_that_arrives_while_the_first_delivery_still_runs_is_not_run(
    system: System, broker: Proxy
) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    # Celery's prefork pool forgets with a connection which process is busy, and may send it more.
    system.worker("-c", "2", pool="threads", **through(broker, system))
    system.reaches("slow", "running")

    broker.cut()
    eventually(lambda: system.depth("celery") == 1)
    broker.resume()
    eventually(lambda: "deferred" in system.events("slow"), deadline=60)
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, system.runs("slow")) == (1, 1)
    eventually(lambda: system.depth("celery") == 0)
    _runs_the_next(system)


@on_rabbitmq
def test_a_retry_that_a_body_asks_for_without_a_broker_is_committed_and_runs_on_recovery(
    system: System, broker: Proxy
) -> None:
    system.shop.wait_and_retry.apply_async(("go",), task_id="again")
    dispatcher = system.dispatcher(**through(broker, system))
    worker = system.worker("-c", "1", pool="prefork", **through(broker, system))
    system.reaches("again", "running")
    eventually(lambda: system.job("again").published_at is not None)

    broker.cut()
    (system.folder / "go").touch()
    job = system.reaches("again", "retrying")
    assert (job.attempt, job.lease) == (1, None)
    # Its row is tried again and again; nothing is parked, and no attempt is lost.
    paused = dispatcher.log().count("outbox.dispatch_paused")
    eventually(lambda: dispatcher.log().count("outbox.dispatch_paused") >= paused + 3)
    assert (system.job("again").state, system.runs("again")) == ("retrying", 1)
    written = [event for event in system.events("again") if event != "published"]
    assert written == ["recorded", "claimed", "retrying"]
    broker.resume()

    job = system.reaches("again", "succeeded", deadline=60)
    assert (job.attempt, system.runs("again")) == (2, 2)
    eventually(lambda: system.depth("celery") == 0)
    assert system.depth("outbox.quarantine") == 0
    assert worker.alive


@on_servers
def test_a_dispatcher_on_a_half_open_connection_gives_up_in_time_and_goes_on_afterwards(
    system: System, broker: Proxy
) -> None:
    dispatcher = system.dispatcher(**through(broker, system))
    system.shop.add.apply_async((1, 2), task_id="before")
    eventually(lambda: system.job("before").published_at is not None)

    broker.stall()
    system.shop.add.apply_async((1, 2), task_id="during")
    eventually(lambda: dispatcher.log().count("outbox.dispatch_paused") >= 2)
    assert system.job("during").published_at is None
    broker.resume()

    eventually(lambda: system.job("during").published_at is not None)
    system.worker()
    for job_id in ("before", "during"):
        assert system.reaches(job_id, "succeeded").attempt == 1
        assert system.runs(job_id) == 1
    eventually(lambda: system.depth("celery") == 0)


@on_rabbitmq
def test_a_worker_on_a_half_open_connection_finishes_and_consumes_again(
    system: System, broker: Proxy
) -> None:
    settings = system.environment["SHOP_SETTINGS"]
    beating = settings.replace("{", '{"broker_heartbeat": 2, ', 1)
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    worker = system.worker(
        "-c", "2", pool="prefork", **through(broker, system), SHOP_SETTINGS=beating
    )
    system.reaches("slow", "running")

    broker.stall()
    (system.folder / "go").touch()
    system.reaches("slow", "succeeded")
    # Both sides miss the other's heartbeats: the broker takes the message back.
    eventually(lambda: system.depth("celery") == 1, deadline=60)
    eventually(lambda: "Connection to broker lost" in worker.log(), deadline=60)
    broker.cut()
    broker.resume()

    eventually(lambda: "duplicate" in system.events("slow"), deadline=60)
    eventually(lambda: system.depth("celery") == 0)
    assert (system.job("slow").attempt, system.runs("slow")) == (1, 1)
    _runs_the_next(system)


def _runs_the_next(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="next")
    assert system.reaches("next", "succeeded", deadline=60).attempt == 1
    assert system.runs("next") == 1
