"""Indexes of a part of a table's rows, and what serves where a database has none of these."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Index, text

from celery_outbox.store.dialects import MYSQL


def partial_index(
    name: str, where: str, *columns: Column[Any], instead: tuple[Column[Any], ...] = ()
) -> None:
    """Add an index to the table of ``columns``.

    Arguments:
        where: the rows that are in it, on databases that have partial indexes.
        instead: the columns of the whole index that MariaDB and MySQL get in its place; by
            default the same.
    """
    condition = text(where)
    partial = Index(name, *columns, postgresql_where=condition, sqlite_where=condition)
    if instead:
        # Several names are documented, and missing in the type hints.
        others: Any = ("postgresql", "sqlite")
        mysql: Any = MYSQL
        partial.ddl_if(dialect=others)
        Index(name, *instead).ddl_if(dialect=mysql)
