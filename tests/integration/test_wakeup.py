"""What wakes a dispatcher before its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from sqlalchemy import text

from celery_outbox.dispatch.wakeup import Listening, Polling, open_wakeup
from celery_outbox.store.engine import open_engine
from tests.factories import add_task, open_outbox

#: Seconds; a wait that is over long before was woken.
LONG = 60.0


def _ends_early(wait: Callable[[float], None]) -> bool:
    begun = time.monotonic()
    wait(LONG)
    return time.monotonic() - begun < LONG / 2


@pytest.fixture(params=["psycopg2", "psycopg"])
def url(request: pytest.FixtureRequest, postgresql_installed_url: str) -> str:
    """A PostgreSQL database, by each driver that can listen."""
    return postgresql_installed_url.replace("+psycopg2", f"+{request.param}")


def test_a_commit_wakes_it_also_one_that_came_before_the_wait(url: str) -> None:
    with open_outbox(url, init=False) as outbox:
        wakeup = open_wakeup(outbox.engine, outbox.tables.channel, notify=True)
        assert isinstance(wakeup, Listening)
        try:
            task = add_task(outbox.app)
            for job_id in ("job-1", "job-2"):
                task.apply_async(task_id=job_id)
                assert _ends_early(wakeup.wait)
            wakeup.set()
            assert _ends_early(wakeup.wait)
            # All of it was taken: nothing is left to wake the next one.
            begun = time.monotonic()
            wakeup.wait(0.3)
            assert time.monotonic() - begun >= 0.3
        finally:
            wakeup.close()


def test_a_lost_connection_is_made_again(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_outbox(url, init=False) as outbox:
        wakeup = open_wakeup(outbox.engine, outbox.tables.channel, notify=True)
        try:
            other = open_engine(url)
            with other.begin() as connection:
                killed = connection.execute(
                    text(
                        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                        " WHERE query LIKE 'LISTEN%' AND datname = current_database()"
                    )
                ).scalar_one()
            other.dispose()
            assert killed == 1
            assert _ends_early(wakeup.wait)
            assert "outbox.listen_lost" in caplog.text
            wakeup.wait(0.0)
            add_task(outbox.app).apply_async(task_id="job-1")
            assert _ends_early(wakeup.wait)
        finally:
            wakeup.close()


def test_without_listen_it_polls(url: str) -> None:
    engine = open_engine(url)
    wakeup = open_wakeup(engine, "channel", notify=False)
    assert type(wakeup) is Polling
    wakeup.close()
    engine.dispose()
