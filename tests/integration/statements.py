"""The statements that a function of the store runs, to be asked about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, event

from tests.factories import Database


@contextmanager
def statements_of(
    database: Database, step: Callable[..., Any], *args: Any, **options: Any
) -> Iterator[tuple[Connection, list[tuple[str, Any]]]]:
    """Run ``step`` and take back what it changed, which would be in the way of another run.

    :returns: the connection, and each statement but insertions, with its parameters.
    """
    statements: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if not statement.startswith("INSERT"):
            statements.append((statement, parameters))

    with database.engine.connect() as connection:
        event.listen(database.engine, "before_cursor_execute", note)
        try:
            step(connection, database.tables, *args, **options)
        finally:
            event.remove(database.engine, "before_cursor_execute", note)
        connection.rollback()
        yield connection, statements
