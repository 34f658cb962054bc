"""Finds the database connection, and with it the transaction, that a call belongs to."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox.exceptions import UnusableSession
from celery_outbox.store.buffer import can_wait
from celery_outbox.store.engine import connection_in
from celery_outbox.store.schema import Tables

#: What a transaction can be found in.
Place = Session | Connection

#: For what must ask the database, and cannot do so in a coroutine.
RUN_SYNC = "call it inside `await session.run_sync(lambda s: task.apply_async(..., session=s))`"

#: The same for what is no call of a task: chords, cancels, revokes.
_ASK_IN_RUN_SYNC = (
    "the database has to be asked, which a coroutine cannot wait for: do it inside"
    " `await session.run_sync(lambda s: ...)`"
)


def place_of(owner: Any, task: str) -> Place | None:
    """The Session or Connection in whatever the caller handed over.

    Arguments:
        owner: a Session, a scoped_session, a Connection, one of their asynchronous kinds, or a
            callable that returns one of these or ``None``.
        task: the task's name, for errors.

    Returns:
        The synchronous one, also of an asynchronous one; ``None`` when the callable had nothing.

    Raises:
        UnusableSession: it is something else.
    """
    if owner is None or isinstance(owner, (Session, Connection)):
        return owner
    if _is_async(owner):
        return _inside(owner, task)
    if isinstance(owner, sessionmaker):
        raise _unusable(owner, task, "it makes a new session each time; pass one of its sessions")
    if callable(owner):
        return place_of(owner(), task)
    raise _unusable(owner, task, "pass a SQLAlchemy Session, scoped_session or Connection")


def connection_of(owner: Any, tables: Tables, task: str) -> Connection | None:
    """The connection of whatever the caller handed over, in the owner's transaction, for what
    asks the database at once.

    Arguments:
        owner, task: see :func:`place_of`.

    Returns:
        ``None`` when a callable had nothing.

    Raises:
        UnusableSession: it is something else, knows no database, or is an asynchronous one in a
            coroutine, which cannot wait for the answer.
    """
    place = place_of(owner, task)
    if place is None:
        return None
    connection = connection_now(place, tables, task)
    if connection is None or not can_wait(connection):
        raise _unusable(owner, task, _ASK_IN_RUN_SYNC)
    return connection


def connection_now(place: Place, tables: Tables, task: str) -> Connection | None:
    """The connection of a session's transaction; ``None``: it has none yet, and a coroutine
    cannot wait for one.

    Raises:
        UnusableSession: the session knows no database.
    """
    if isinstance(place, Connection):
        return place
    try:
        bind = place.get_bind(clause=tables.job)
        if can_wait(bind):
            return connection_in(place, tables)
    except UnboundExecutionError as error:
        raise _unusable(
            place, task, "it has no bind for the outbox tables: Session(bind=engine)"
        ) from error
    transaction = place.get_nested_transaction() or place.get_transaction()
    # Session.connection() would open one, or begin a savepoint.
    found = getattr(transaction, "_connections", {}).get(bind)
    return None if found is None else found[0]


def begun(owner: Any) -> Any:
    """A configured session, if a transaction has begun in it; else ``None``.

    In a worker no framework commits at the end: a session that the body has not touched would
    never be committed, and the call with it.
    """
    if isinstance(owner, scoped_session):
        owner = owner() if owner.registry.has() else None
    elif owner is not None and not isinstance(owner, (Session, Connection)):
        owner = owner()
    return owner if owner is not None and owner.in_transaction() else None


def _is_async(owner: Any) -> bool:
    # By name: importing sqlalchemy.ext.asyncio fails where greenlet is not installed.
    return any(kind.__module__.startswith("sqlalchemy.ext.asyncio") for kind in type(owner).__mro__)


def _inside(owner: Any, task: str) -> Place | None:
    """What an asynchronous session or connection stands for."""
    if hasattr(owner, "registry"):
        return place_of(owner(), task)
    if hasattr(owner, "sync_session"):
        session: Session = owner.sync_session
        return session
    connection: Connection | None = getattr(owner, "sync_connection", None)
    if connection is None:
        remedy = "pass an AsyncSession, an async_scoped_session or an AsyncConnection that is open"
        raise _unusable(owner, task, remedy)
    return connection


def _unusable(owner: Any, task: str, remedy: str) -> UnusableSession:
    return UnusableSession(task=task, kind=type(owner).__name__, remedy=remedy)
