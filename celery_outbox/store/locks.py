"""Named locks with an end: one holder at a time, and another one when the holder falls silent."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, case, func, or_, select, update

from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.dialects import insert_if_absent, is_mysql
from celery_outbox.store.schema import Tables

#: Held by whoever does the maintenance.
MAINTENANCE = "maintenance"

#: Milliseconds for which a transaction may do nothing (PostgreSQL documentation, section 20.11.1).
_IDLE = "idle_in_transaction_session_timeout"


def hold(connection: Connection, tables: Tables, name: str, *, holder: str, ttl: float) -> bool:
    """Take a lock that is free or whose time is over, or keep the one that is held already.

    Each change of the holder makes the lock's token grow. Nobody waits for another one who is about
    to do the same. Where the rest of the transaction takes place, the server ends it (PostgreSQL)
    when nothing is heard of it for as long: what a frozen holder has locked is free then.

    Arguments:
        holder: names one holder, which no other has.
        ttl: seconds from now for which it is held without another call.

    Returns:
        Whether it is held by ``holder`` now.
    """
    lock = tables.lock
    ours = (lock.c.held_by == holder) & (lock.c.held_until > db_now())
    statement: Any = (
        update(lock)
        .where(
            lock.c.name.in_(_unless_locked(connection, tables, name)),
            or_(
                lock.c.held_by.is_(None),
                lock.c.held_by == holder,
                lock.c.held_until <= db_now(),
            ),
        )
        .values(
            token=case((ours, lock.c.token), else_=lock.c.token + 1),
            held_by=holder,
            held_until=db_after(ttl),
        )
    )
    if connection.dialect.name == "postgresql":
        # In the same statement: it costs no round trip. Ends with the transaction.
        idle = func.set_config(_IDLE, str(max(int(ttl * 1000), 1)), True)
        statement = statement.returning(idle)
    if connection.execute(statement).rowcount == 1:
        return True
    if connection.execute(select(lock.c.name).where(lock.c.name == name)).first() is not None:
        # An INSERT would wait for whoever has the row locked.
        return False
    first = {"name": name, "token": 1, "held_by": holder, "held_until": db_after(ttl)}
    return insert_if_absent(connection, lock, first)


def holder_of(connection: Connection, tables: Tables, name: str) -> str | None:
    """Who holds a lock at this moment, or ``None``: nobody."""
    lock = tables.lock
    statement = select(lock.c.held_by).where(lock.c.name == name, lock.c.held_until > db_now())
    found: str | None = connection.execute(statement).scalar()
    return found


def release(connection: Connection, tables: Tables, name: str, *, holder: str) -> bool:
    """Give a lock up; returns whether it was ours to give."""
    lock = tables.lock
    statement = (
        update(lock)
        .where(lock.c.name.in_(_unless_locked(connection, tables, name)), lock.c.held_by == holder)
        .values(held_by=None, held_until=None)
    )
    return bool(connection.execute(statement).rowcount == 1)


def _unless_locked(
    connection: Connection, tables: Tables, name: str
) -> Select[tuple[str]] | list[str]:
    lock = tables.lock
    free = select(lock.c.name).where(lock.c.name == name).with_for_update(skip_locked=True)
    # MySQL does not change a table that the same statement reads.
    return list(connection.execute(free).scalars()) if is_mysql(connection.dialect) else free
