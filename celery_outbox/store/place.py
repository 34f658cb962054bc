"""Where a database is, as far as its URL says."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL

#: Default ports, which a URL may leave out.
_PORTS = {"postgresql": 5432, "mysql": 3306, "mariadb": 3306}

#: Where a socket or another host may be named instead.
_OPTIONS = ("host", "port", "service", "unix_socket", "unix_sock", "options")


def same_place(one: URL, other: URL) -> bool:
    """Whether two URLs lead to the same database: whatever the driver, the user and the options.

    ``False`` says nothing: a database may have several names.
    """
    return _place(one) == _place(other)


def _place(url: URL) -> tuple[object, ...]:
    kind, database = url.get_backend_name(), url.database
    if kind == "sqlite" and database and not database.startswith(("file:", ":")):
        database = str(Path(database).resolve())
    options = tuple(url.query.get(name) for name in _OPTIONS)
    return kind, url.host, url.port or _PORTS.get(kind), database, options
