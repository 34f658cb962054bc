"""Notifications of PostgreSQL, which wake dispatchers."""

from __future__ import annotations

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
