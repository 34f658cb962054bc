"""The wake-up is relied on where it is heard, and only there."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from celery_outbox.dispatch import wakeup as waking
from celery_outbox.dispatch.wakeup import Listening, Polling, open_wakeup
from celery_outbox.store.engine import open_engine
from celery_outbox.store.limits import Limits
from celery_outbox.store.notification import fall_asleep, notify
from tests.factories import add_task, open_outbox
from tests.proxy import Proxy
from tests.servers.pgbouncer import Pgbouncer
from tests.wait import eventually
from tests.watchdog import Watchdog

CHANNEL = "outbox.test"
#: Longer than any test waits.
LONG = 300.0


@pytest.fixture(params=["psycopg2", "psycopg"])
def url(request: pytest.FixtureRequest, postgresql_installed_url: str) -> str:
    """A PostgreSQL database, by each driver that can listen."""
    return postgresql_installed_url.replace("+psycopg2", f"+{request.param}")


@pytest.fixture
def engine_for() -> Iterator[Callable[[str], Engine]]:
    """Opens engines that are disposed of after the test."""
    engines: list[Engine] = []

    def engine_for(url: str) -> Engine:
        engines.append(open_engine(url))
        return engines[-1]

    yield engine_for
    for engine in engines:
        engine.dispose()


@pytest.fixture
def pooler(
    postgresql_installed_url: str, request: pytest.FixtureRequest, watchdog: Watchdog
) -> Iterator[Pgbouncer]:
    """A PgBouncer in the mode that the parameter names."""
    pooler = Pgbouncer.to(postgresql_installed_url, watchdog, mode=request.param, connections=3)
    yield pooler
    pooler.stop()


def commit(engine: Engine) -> None:
    """Do what a caller's commit does."""
    with engine.begin() as connection:
        notify(connection, CHANNEL)


def listens(listening: Listening) -> bool:
    """Wait a moment, as an idle dispatcher does, and tell whether it relies on LISTEN."""
    listening.wait(0.05)
    return listening._listens


def test_a_commit_ends_a_wait(url, engine_for):
    engine = engine_for(url)
    listening = Listening(engine, CHANNEL)
    listening.start()
    eventually(lambda: listens(listening))
    began = time.monotonic()
    for _ in range(3):
        commit(engine)
        listening.wait(LONG)
    assert time.monotonic() - began < LONG
    listening.close()


def test_nobody_falls_asleep_beside_a_call_that_is_not_committed(
    url, postgresql_installed_url, engine_for
):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        listening = Listening(engine_for(url), outbox.tables.channel)
        listening.start()
        eventually(lambda: listens(listening))
        with Session(outbox.engine) as session:
            export.apply_async((1,), session=session)
            outbox.write(session)
            listening.doze()
            # It would not be told of the commit: it naps, and looks again.
            assert not listening._dozes
            listening.wait(LONG)
            session.commit()
        listening.doze()
        assert listening._dozes
        export.delay(2)
        listening.wait(LONG)
        # Awake, it lets those who record alone.
        listening.rise()
        with outbox.engine.begin() as connection:
            assert fall_asleep(connection.connection.dbapi_connection, outbox.tables.channel)
        listening.close()


def test_of_two_that_sleep_both_are_woken_and_one_that_is_gone_holds_nobody_up(
    url, postgresql_installed_url, engine_for
):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        two = [Listening(engine_for(url), outbox.tables.channel) for _ in range(2)]
        for listening in two:
            listening.start()
            eventually(lambda each=listening: listens(each))
            listening.doze()
        export.delay(1)
        for listening in two:
            assert select.select([listening._connection], [], [], 30)[0]
        first, second = two
        first.close()
        second.wait(LONG)

        def dozes() -> bool:
            second.doze()
            return second._dozes

        eventually(dozes)
        export.delay(2)
        second.wait(LONG)
        second.close()


def test_what_arrives_while_the_connection_is_asked_is_not_missed(url, engine_for):
    engine = engine_for(url)
    listening = Listening(engine, CHANNEL)
    listening.start()
    eventually(lambda: listens(listening))
    assert listening._take() == set()
    commit(engine)
    assert select.select([listening._connection], [], [], LONG)[0]
    listening.doze()
    assert listening._take() == {CHANNEL}
    assert listening._take() == set()
    listening.close()


def test_a_stop_ends_a_wait(url, engine_for):
    listening = Listening(engine_for(url), CHANNEL)
    listening.start()
    eventually(lambda: listens(listening))
    listening.set()
    began = time.monotonic()
    listening.wait(LONG)
    assert time.monotonic() - began < LONG
    listening.close()


def test_a_wait_ends_when_it_began_to_listen_again_since_something_may_have_been_missed(
    url, engine_for
):
    engine = engine_for(url)
    listening = Listening(engine, CHANNEL)
    listening.start()
    eventually(lambda: listens(listening))
    listening._connection.close()
    began = time.monotonic()
    # The first finds the loss, the second begins anew; both end for a look at the table.
    listening.wait(LONG)
    listening.wait(LONG)
    assert listening._listens
    commit(engine)
    listening.wait(LONG)
    assert time.monotonic() - began < LONG
    listening.close()


@pytest.mark.parametrize("pooler", ["session"], indirect=True)
def test_through_a_pooler_that_keeps_connections_it_listens(
    pooler, postgresql_installed_url, engine_for, caplog
):
    engine = engine_for(pooler.url_for(postgresql_installed_url))
    listening = open_wakeup(engine, CHANNEL, notify=True)
    assert isinstance(listening, Listening)
    eventually(lambda: listens(listening))
    commit(engine)
    began = time.monotonic()
    listening.wait(LONG)
    assert time.monotonic() - began < LONG
    assert caplog.messages == []
    listening.close()


@pytest.mark.parametrize("pooler", ["transaction"], indirect=True)
def test_through_a_pooler_that_swaps_connections_it_polls_and_says_so_once(
    pooler, postgresql_installed_url, engine_for, caplog, monkeypatch
):
    monkeypatch.setattr(waking, "PROBE_TIMEOUT", 0.5)
    monkeypatch.setattr(waking, "DEAF_INTERVAL", 0.2)
    engine = engine_for(pooler.url_for(postgresql_installed_url))
    listening = open_wakeup(engine, CHANNEL, notify=True)
    assert isinstance(listening, Listening)
    with caplog.at_level(logging.INFO, "celery_outbox"):
        eventually(lambda: not listens(listening) and listening._is_deaf)
        # It tries again now and then, and does not say it again.
        tried = [listening._connect_at]
        eventually(lambda: listens(listening) or listening._connect_at > tried[0])
        eventually(lambda: not listens(listening) and listening._connection is None)
    assert not listening._listens
    [said] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.outbox_event == "outbox.listen_unheard"
    # Nothing was left behind on a connection that others use now.
    with engine.connect() as connection:
        channels = connection.exec_driver_sql("SELECT pg_listening_channels()").scalars().all()
    assert CHANNEL not in channels
    listening.close()


def test_a_wake_up_that_has_died_silently_is_noticed_and_replaced(
    url, engine_for, proxy_to: Callable[[str], Proxy], caplog, monkeypatch
):
    monkeypatch.setattr(waking, "PROBE_TIMEOUT", 0.5)
    monkeypatch.setattr(waking, "PROBE_INTERVAL", 0.1)
    direct = engine_for(url)
    proxy = proxy_to(url)
    listening = Listening(engine_for(proxy.url_for(url)), CHANNEL)
    listening.start()
    eventually(lambda: listens(listening))
    # What it is told comes over another way, as the first gives no sign of life.
    listening._engine = direct
    proxy.stall()
    before = listening._connection
    eventually(lambda: listens(listening) and listening._connection is not before)
    assert [record.outbox_event for record in caplog.records] == ["outbox.listen_lost"]
    commit(direct)
    began = time.monotonic()
    listening.wait(LONG)
    assert time.monotonic() - began < LONG
    listening.close()


def test_without_listen_it_polls(url, engine_for):
    wakeup = open_wakeup(engine_for(url), CHANNEL, notify=False)
    assert type(wakeup) is Polling
    wakeup.close()


@pytest.mark.parametrize("is_trusted", [False, True], ids=["first LISTEN", "next probe"])
def test_a_database_that_falls_silent_does_not_hold_the_wait(
    postgresql_installed_url, engine_for, proxy_to, monkeypatch, caplog, is_trusted
):
    proxy: Proxy = proxy_to(postgresql_installed_url)
    limits = Limits()
    listening = Listening(
        engine_for(proxy.url_for(postgresql_installed_url) + "?connect_timeout=2"),
        CHANNEL,
        lambda driver: limits.driver_at_most(driver, 0.3),
    )
    listening.start()
    # Its notification to itself is there, and not yet read.
    assert select.select([listening._connection], [], [], 30)[0]
    if is_trusted:
        monkeypatch.setattr(waking, "PROBE_INTERVAL", 0.0)
        eventually(lambda: listens(listening))
        listening._expected_by = None
    proxy.stall()
    listening.wait(0.05)
    assert "outbox.listen_lost" in caplog.text
    proxy.resume()
    eventually(lambda: listens(listening))
    listening.close()
