"""The database is away or silent: at the call, the claim, the settle, in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from celery_outbox.execute.payload import decode_result
from celery_outbox.store import job as jobs
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.processes import Processes
from tests.proxy import Proxy
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually
from tests.watchdog import Watchdog


@pytest.fixture(scope="module")
def own_postgresql(watchdog: Watchdog) -> Iterator[Postgresql]:
    """A server that these tests may stop."""
    server = Postgresql.start(watchdog, private=True)
    yield server
    server.stop()


@pytest.fixture
def stoppable(
    own_postgresql: Postgresql,
    request: pytest.FixtureRequest,
    processes: Processes,
    tmp_path: Path,
    rabbitmq_url: str,
) -> Iterator[System]:
    """A system whose database server can be stopped."""
    folder = tmp_path / "shop"
    folder.mkdir()
    url = own_postgresql.create_database(f"outbox_{abs(hash(request.node.name))}")
    system = System("own", processes, folder, url, rabbitmq_url)
    yield system
    system.close()


@pytest.fixture
def database(system: System, proxy_to: Callable[[str], Proxy]) -> Proxy:
    """The way to the database, for those processes that are started with :func:`through`."""
    return proxy_to(system.environment["SHOP_DATABASE"])


def through(database: Proxy, system: System) -> dict[str, str]:
    """The environment of a process that reaches the database through the proxy."""
    return {"SHOP_DATABASE": database.url_for(system.environment["SHOP_DATABASE"])}


def test_work_outlives_a_database_that_is_away_from_the_body_to_the_settle(
    stoppable: System, own_postgresql: Postgresql, rabbitmq_api: RabbitmqApi
) -> None:
    system = stoppable
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    dispatcher = system.dispatcher()
    worker = system.worker("-c", "1", pool="prefork")
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    own_postgresql.stop()
    with pytest.raises(OperationalError, match="Connection refused"):
        system.shop.add.apply_async((1, 2), task_id="refused")
    (system.folder / "go").touch()
    # The result is kept and tried again and again, with growing pauses; well past the lease.
    eventually(lambda: worker.log().count("during=succeeded") >= 6)
    eventually(lambda: worker.log().count("outbox.heartbeat_failed") >= 2)
    eventually(lambda: "outbox.dispatch_paused" in dispatcher.log())
    # Unacknowledged, and not put back either.
    eventually(lambda: rabbitmq_api.unacknowledged("celery") == 1)
    assert system.depth("celery") == 0
    own_postgresql.start_again()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("slow")) == (1, 1, 1)
    eventually(lambda: rabbitmq_api.unacknowledged("celery") == 0)
    assert _result(system, "slow") == "go"
    assert sorted(system.events("slow")) == ["claimed", "published", "recorded", "succeeded"]
    # Pauses of 0.1 s that double up to 5 s: no more than these in the time that this took.
    assert worker.log().count("during=succeeded") <= 40
    system.shop.add.apply_async((1, 2), task_id="next")
    assert system.reaches("next", "succeeded").attempt == 1
    eventually(lambda: system.depth("celery") == 0)
    assert all(process.alive for process in (dispatcher, worker))


def test_a_claim_that_a_crash_of_the_database_takes_away_is_made_again(
    stoppable: System, own_postgresql: Postgresql
) -> None:
    system = stoppable
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher("--once").wait()
    # Nobody else writes: with the next commit that waits, the claim would be on the disk, too.
    settings = json.loads(system.environment["SHOP_SETTINGS"])
    quiet = {**settings, "outbox_lease": 900.0, "outbox_heartbeat_interval": 300.0}
    own_postgresql.write_nothing_late()
    worker = system.worker("-c", "1", pool="prefork", SHOP_SETTINGS=json.dumps(quiet))
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)
    claimed = system.job("slow")

    own_postgresql.crash()
    own_postgresql.start_again()
    forgotten = system.job("slow")
    assert (claimed.attempt, forgotten.attempt, forgotten.state) == (1, 0, "queued")
    (system.folder / "go").touch()

    # The first run has nothing to end, and nothing of it stays; nobody publishes a second message.
    job = system.reaches("slow", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("slow")) == (1, 1, 2)
    assert "outbox.claim_forgotten" in worker.log()
    assert sorted(system.events("slow")) == ["claimed", "published", "recorded", "succeeded"]
    eventually(lambda: system.depth("celery") == 0)
    assert system.depth("outbox.quarantine") == 0


def test_worker_and_dispatcher_start_without_a_database_and_find_it_later(
    stoppable: System, own_postgresql: Postgresql
) -> None:
    system = stoppable
    system.shop.add.apply_async((1, 2), task_id="first")
    system.dispatcher("--once").wait()
    system.shop.add.apply_async((1, 2), task_id="second")
    own_postgresql.stop()

    dispatcher, worker = system.dispatcher(), system.worker("-c", "1", pool="prefork")
    # The message is claimed again and again, with growing pauses, and stays unacknowledged.
    eventually(lambda: worker.log().count("during=claim") >= 6)
    eventually(lambda: dispatcher.log().count("outbox.dispatch_paused") >= 3)
    assert system.depth("celery") == 0
    assert worker.log().count("during=claim") <= 40
    own_postgresql.start_again()

    for job_id in ("first", "second"):
        job = system.reaches(job_id, "succeeded")
        assert (job.attempt, job.deliveries, system.runs(job_id)) == (1, 1, 1)
    eventually(lambda: system.depth("celery") == 0)
    assert all(process.alive for process in (dispatcher, worker))


def test_a_claim_that_waited_too_long_puts_the_message_back_and_does_not_spin(
    stoppable: System, own_postgresql: Postgresql
) -> None:
    system = stoppable
    system.shop.add.apply_async((1, 2), task_id="job")
    system.dispatcher("--once").wait()
    own_postgresql.stop()
    settings = system.environment["SHOP_SETTINGS"]
    impatient = settings.replace("{", '{"outbox_database_timeout": 0.5, ', 1)

    worker = system.worker("-c", "1", pool="prefork", SHOP_SETTINGS=impatient)
    eventually(lambda: worker.log().count("outbox.claim_failed") >= 2, deadline=60)
    # Each delivery tries for half a second and pauses for five.
    assert worker.log().count("during=claim") <= 5 * worker.log().count("outbox.claim_failed") + 5
    own_postgresql.start_again()

    job = system.reaches("job", "succeeded", deadline=60)
    assert (job.attempt, system.runs("job")) == (1, 1)
    eventually(lambda: system.depth("celery") == 0)


@on_rabbitmq
def test_all_backends_terminated_in_the_middle_of_a_task_are_replaced(system: System) -> None:
    settings = system.environment["SHOP_SETTINGS"]
    for name, short, long in (
        ("outbox_poll_interval", "0.1", "600"),
        ("outbox_maintenance_interval", "0.2", "600"),
    ):
        settings = settings.replace(f'"{name}": {short}', f'"{name}": {long}')
    dispatcher = system.dispatcher(SHOP_SETTINGS=settings)
    worker = system.worker("-c", "1", pool="prefork")
    eventually(lambda: "outbox.dispatcher_started" in dispatcher.log())
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.reaches("slow", "running")

    assert _terminate_all_others(system) >= 2
    # It looks once, finds nothing, and would look again in ten minutes.
    eventually(lambda: "outbox.listen_lost" in dispatcher.log())
    (system.folder / "go").touch()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("slow")) == (1, 1, 1)
    assert _result(system, "slow") == "go"
    eventually(lambda: system.depth("celery") == 0)
    # Twice, as the first may be found by the look that follows the loss.
    for job_id in ("next", "last"):
        system.shop.add.apply_async((1, 2), task_id=job_id)
        assert system.reaches(job_id, "succeeded").attempt == 1
    assert all(process.alive for process in (dispatcher, worker))


@on_rabbitmq
def test_a_half_open_connection_delays_the_claim_and_the_settle_and_loses_nothing(
    system: System, database: Proxy
) -> None:
    worker = system.worker("-c", "1", pool="prefork", **through(database, system))
    eventually(lambda: " ready." in worker.log())
    system.shop.add.apply_async((1, 2), task_id="warm")
    system.dispatcher("--once").wait()
    system.reaches("warm", "succeeded")

    # At the claim: the delivery hangs, and the connection ends without an answer.
    database.stall()
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher("--once").wait()
    eventually(lambda: "shop.wait_for[slow] received" in worker.log())
    assert system.job("slow").state == "queued"
    database.cut()
    database.resume()
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    # At the settle, with the heartbeats: nobody else looks after the lease meanwhile.
    database.stall()
    (system.folder / "go").touch()
    lease = system.job("slow").lease
    assert lease is not None
    eventually(lambda: _has_passed(system, lease.until))
    assert system.job("slow").state == "running"
    database.cut()
    database.resume()

    job = system.reaches("slow", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("slow")) == (1, 1, 1)
    assert _result(system, "slow") == "go"
    eventually(lambda: system.depth("celery") == 0)


@on_rabbitmq
def test_a_worker_that_was_cut_off_past_its_lease_changes_nothing_any_more(
    system: System, database: Proxy
) -> None:
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.dispatcher()
    # One message at a time: the next one is left for the other worker.
    one = ("-c", "1", "--prefetch-multiplier", "1", "-n", "one@%h")
    cut_off = system.worker(*one, pool="prefork", **through(database, system))
    system.reaches("slow", "running")
    eventually(lambda: system.runs("slow") == 1)

    database.stall()
    system.worker("-n", "two@%h", "-c", "1", pool="prefork")
    eventually(lambda: system.runs("slow") == 2, deadline=60)
    assert system.job("slow").attempt == 2
    (system.folder / "go").touch()
    first = system.reaches("slow", "succeeded")
    database.cut()
    database.resume()

    eventually(lambda: "stale" in system.events("slow"), deadline=60)
    eventually(lambda: "outbox.lease_lost" in cut_off.log())
    after = system.job("slow")
    assert (after.state, after.attempt, after.finished_at) == ("succeeded", 2, first.finished_at)
    assert system.events("slow").count("succeeded") == 1
    eventually(lambda: system.depth("celery") == 0)
    assert system.depth("outbox.quarantine") == 0


def _result(system: System, job_id: str) -> object:
    with system.outbox.engine.connect() as connection:
        job = jobs.get(connection, system.outbox.tables, job_id)
    assert job is not None
    return decode_result(job.result, job.result_type)


def _has_passed(system: System, moment: object) -> bool:
    with system.outbox.engine.connect() as connection:
        return bool(
            connection.execute(
                text("SELECT statement_timestamp() > :moment"), {"moment": moment}
            ).scalar_one()
        )


def _terminate_all_others(system: System) -> int:
    statement = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with system.outbox.engine.connect() as connection:
        return int(connection.execute(text(statement)).scalar_one())
