"""The bound on a silent database: its connection is cut, and nothing else is."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError

from celery_outbox import Outbox
from celery_outbox.store import limits
from celery_outbox.store.limits import Limits
from tests.factories import open_outbox
from tests.wait import eventually

pytestmark = pytest.mark.once


@pytest.fixture
def silent(postgresql_installed_url: str):
    """An outbox on PostgreSQL, which can be told to say nothing for a while."""
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        yield outbox


@pytest.fixture
def silent_mariadb(mariadb_installed_url: str):
    """The same on MariaDB, whose driver shows its socket in another way."""
    with open_outbox(mariadb_installed_url, init=False) as outbox:
        yield outbox


def sleep(outbox: Outbox, seconds: float, patience: float) -> None:
    function = "pg_sleep" if outbox.engine.dialect.name == "postgresql" else "sleep"
    outbox.database.write(
        lambda connection: connection.execute(text(f"SELECT {function}(:s)"), {"s": seconds}),
        patience=patience,
    )


@pytest.mark.parametrize("kind", ["silent", "silent_mariadb"])
def test_a_transaction_that_takes_too_long_is_cut_and_the_next_one_works(kind, request, caplog):
    silent = request.getfixturevalue(kind)
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


def test_a_socket_that_got_the_number_of_a_lost_connection_is_left_alone(silent, caplog):
    # libpq closes the socket of a connection that is lost, whatever block it is in, and the next
    # one that somebody opens has its number.
    ours, theirs = socket.socketpair()
    with silent.engine.connect() as connection:
        lost = connection.connection.dbapi_connection.fileno()
        kept = os.dup(lost)
        with silent.database.limit(connection, patience=0.1):
            os.dup2(ours.fileno(), lost)
            watched = silent.database._limits._watched
            eventually(lambda: not watched)
        theirs.sendall(b"still open")
        assert ours.recv(100) == b"still open"
        os.dup2(kept, lost)
        assert connection.scalar(text("SELECT 1")) == 1
    os.close(kept)
    ours.close()
    theirs.close()
    assert "outbox.database_silent" not in caplog.text


def test_a_connection_that_is_closed_already_is_reported_by_its_use(silent):
    with silent.engine.connect() as connection:
        connection.connection.dbapi_connection.close()
        with silent.database.limit(connection), pytest.raises(DBAPIError) as caught:
            connection.execute(text("SELECT 1"))
    assert caught.value.connection_invalidated


def test_a_watcher_that_died_is_followed_by_another(silent, monkeypatch):
    def fail(found: Any) -> bool:
        raise ValueError

    watcher = Limits()
    silent.database._limits = watcher
    with monkeypatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda arguments: None)
        patch.setattr(limits, "_shut_down", fail)
        with silent.engine.connect() as connection, watcher.at_most(connection, 0.0):
            assert watcher._thread is not None
            watcher._thread.join(30)
    assert not watcher._thread.is_alive()
    with pytest.raises(OperationalError):
        sleep(silent, 60, patience=0.2)


def test_what_takes_the_log_may_use_the_database(silent, monkeypatch):
    answers: list[Any] = []

    def ask(*arguments: Any, **fields: Any) -> None:
        read = silent.database.read
        asking = threading.Thread(
            target=lambda: answers.append(read(lambda c: c.scalar(text("SELECT 1")))), daemon=True
        )
        asking.start()
        asking.join(30)

    monkeypatch.setattr(limits, "log_event", ask)
    with pytest.raises(OperationalError):
        sleep(silent, 60, patience=0.2)
    eventually(lambda: answers == [1])
