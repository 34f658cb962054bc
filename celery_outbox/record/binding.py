"""Finds the database connection, and with it the transaction, that a call belongs to."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from celery_outbox.exceptions import UnusableSession
from celery_outbox.store.engine import connection_in
from celery_outbox.store.schema import Tables


def connection_of(owner: Any, tables: Tables, task: str) -> Connection | None:
    """The connection of whatever the caller handed over.

    Arguments:
        owner: a Session, a scoped_session, a Connection, or a callable that returns one of
            these or ``None``.
        task: the task's name, for errors.

    Returns:
        The connection, in the owner's transaction; ``None`` when the callable had nothing.

    Raises:
        UnusableSession: it is something else, or knows no database.
    """
    if owner is None:
        return None
    if isinstance(owner, scoped_session):
        owner = owner()
    if isinstance(owner, Connection):
        return owner
    if isinstance(owner, Session):
        return _of_session(owner, tables, task)
    if _is_async(owner):
        raise _unusable(
            owner,
            task,
            "call it inside `await session.run_sync(lambda s: task.apply_async(..., session=s))`",
        )
    if callable(owner):
        return connection_of(owner(), tables, task)
    raise _unusable(owner, task, "pass a SQLAlchemy Session, scoped_session or Connection")


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


def _of_session(session: Session, tables: Tables, task: str) -> Connection:
    try:
        return connection_in(session, tables)
    except UnboundExecutionError as error:
        raise _unusable(
            session, task, "it has no bind for the outbox tables: Session(bind=engine)"
        ) from error


def _unusable(owner: Any, task: str, remedy: str) -> UnusableSession:
    return UnusableSession(task=task, kind=type(owner).__name__, remedy=remedy)
