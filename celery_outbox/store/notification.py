"""Notifications of PostgreSQL, which wake dispatchers.

Commits that notify wait for one another: PostgreSQL orders them by a lock that each holds until it
is on disk (PostgreSQL source, ``PreCommit_Notify``). So a call notifies only while a dispatcher
sleeps. That is told by an advisory lock, which a sleeping dispatcher holds, and which whoever
records tries to share until the end of the transaction. A recorder that cannot have it notifies. A
dispatcher that cannot have it has a recorder beside it, or another dispatcher that sleeps. So what
is recorded is either there when a dispatcher that has the lock looks once more, or notifies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, func, select
from sqlalchemy.engine import TwoPhaseTransaction


def notify(connection: Connection, channel: str) -> None:
    """Send an empty notification when the transaction commits (PostgreSQL)."""
    connection.execute(select(func.pg_notify(channel, "")))


def can_notify(connection: Connection) -> bool:
    """Whether a statement of this transaction may notify: a transaction that is to be committed
    in two phases cannot (PostgreSQL documentation, PREPARE TRANSACTION)."""
    return connection.dialect.name == "postgresql" and not isinstance(
        connection.get_transaction(), TwoPhaseTransaction
    )


def sleep_key(channel: str) -> int:
    """The number of the advisory lock of a channel's sleeping dispatchers."""
    digest = hashlib.sha256(f"celery_outbox sleeps: {channel}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def listen(driver: Any, channel: str) -> None:
    """Listen on a channel with a driver's own connection, which is in autocommit."""
    with driver.cursor() as cursor:
        cursor.execute(f'LISTEN "{channel}"')


def fall_asleep(driver: Any, channel: str) -> bool:
    """Have those who record notify a driver's own connection.

    Returns:
        Whether they will; ``False``: somebody is recording at this moment, or another dispatcher
        sleeps, for which they notify this one, too.
    """
    with driver.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", (sleep_key(channel),))
        return bool(cursor.fetchone()[0])


def wake_up(driver: Any, channel: str) -> None:
    """Undo :func:`fall_asleep`."""
    with driver.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock(%s)", (sleep_key(channel),))


#: Takes what has arrived, without waiting, and returns the channels that it came on.
Take = Callable[[], set[str]]


def _of_psycopg2(connection: Any) -> Take:
    def take() -> set[str]:
        connection.poll()
        channels = {notification.channel for notification in connection.notifies}
        connection.notifies.clear()
        return channels

    return take


def _of_psycopg(connection: Any) -> Take:
    # Of libpq itself: the driver's own way blocks, and cannot be woken by anything else. What
    # arrives while the driver waits for an answer, it takes out of libpq for its handlers.
    libpq = connection.pgconn
    arrived: set[str] = set()
    connection.add_notify_handler(lambda notification: arrived.add(notification.channel))

    def take() -> set[str]:
        libpq.consume_input()
        while (notification := libpq.notifies()) is not None:
            arrived.add(notification.relname.decode())
        channels = arrived.copy()
        arrived.clear()
        return channels

    return take


#: Of each driver that can listen: what takes from a connection of its own.
ARRIVALS: dict[str, Callable[[Any], Take]] = {"psycopg2": _of_psycopg2, "psycopg": _of_psycopg}
