"""The bound on a silent database: its connection is cut, and nothing else is."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from celery_outbox import Outbox
from celery_outbox.store import limits
from celery_outbox.store.limits import Limits
from tests.factories import open_outbox
from tests.wait import eventually


@pytest.fixture
def silent(postgresql_installed_url: str):
    """An outbox on PostgreSQL, which can be told to say nothing for a while."""
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        yield outbox


def sleep(outbox: Outbox, seconds: float, patience: float) -> None:
    outbox.database.write(
        lambda connection: connection.execute(text("SELECT pg_sleep(:s)"), {"s": seconds}),
        patience=patience,
    )


def test_a_transaction_that_takes_too_long_is_cut_and_the_next_one_works(silent, caplog):
    with pytest.raises(OperationalError) as caught:
        sleep(silent, 60, patience=0.3)
    assert caught.value.connection_invalidated
    assert "outbox.database_silent" in caplog.text
    sleep(silent, 0, patience=30)


def test_one_that_is_cut_does_not_take_another_one_along(silent):
    errors: list[Exception] = []

    def wait() -> None:
        try:
            sleep(silent, 2, patience=30)
        except OperationalError as error:
            errors.append(error)

    other = threading.Thread(target=wait)
    other.start()
    with pytest.raises(OperationalError):
        sleep(silent, 60, patience=0.2)
    other.join(30)
    assert not other.is_alive()
    assert errors == []


def test_the_watcher_sleeps_when_there_is_nothing_to_watch_and_wakes_again(silent, monkeypatch):
    monkeypatch.setattr(limits, "LINGER", 0.0)
    monkeypatch.setattr(limits, "TICK", 0.01)
    watcher = Limits()
    silent.database._limits = watcher
    sleep(silent, 0, patience=30)
    eventually(lambda: watcher._sleeping)
    with pytest.raises(OperationalError):
        sleep(silent, 60, patience=0.2)
    assert watcher._watched == {}


def test_a_database_without_a_socket_is_left_alone(sqlite_installed_url):
    with open_outbox(sqlite_installed_url, init=False) as outbox:
        assert outbox.database.write(lambda c: c.scalar(text("SELECT 1")), patience=0.0) == 1
        assert outbox.database._limits._thread is None
