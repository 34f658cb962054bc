"""Notifications of PostgreSQL, which wake dispatchers."""

from __future__ import annotations

from sqlalchemy import Connection, func, select


def notify(connection: Connection, channel: str) -> None:
    """Send an empty notification when the transaction commits (PostgreSQL)."""
    connection.execute(select(func.pg_notify(channel, "")))
