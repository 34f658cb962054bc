"""The fixtures of tests against a real database."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from celery_outbox import Outbox
from tests.factories import Database, open_database, open_outbox
from tests.servers.mariadb import Mariadb
from tests.servers.postgresql import Postgresql
from tests.servers.sql_server import SqlServer


def _share(server: SqlServer) -> Iterator[str]:
    name = f"outbox_test_{os.getpid()}_shared"
    url = server.create_database(name)
    with open_database(url):
        yield url
    server.drop_database(name)


def _emptied(url: str) -> str:
    with open_database(url, init=False) as database:
        database.empty()
    return url


@pytest.fixture(scope="session")
def shared_postgresql_url(postgresql_server: Postgresql) -> Iterator[str]:
    """A database with outbox tables for many tests: making one for each takes too long."""
    yield from _share(postgresql_server)


@pytest.fixture
def postgresql_installed_url(shared_postgresql_url: str) -> str:
    """The URL of a PostgreSQL database whose outbox tables are empty."""
    return _emptied(shared_postgresql_url)


@pytest.fixture(scope="session")
def shared_mariadb_url(mariadb_server: Mariadb) -> Iterator[str]:
    """A database with outbox tables for many tests: making one for each takes too long."""
    yield from _share(mariadb_server)


@pytest.fixture
def mariadb_installed_url(shared_mariadb_url: str) -> str:
    """The URL of a MariaDB database whose outbox tables are empty."""
    return _emptied(shared_mariadb_url)


@pytest.fixture
def sqlite_installed_url(sqlite_url: str) -> str:
    """The URL of an SQLite database whose outbox tables are empty."""
    with open_database(sqlite_url):
        return sqlite_url


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def installed_url(request: pytest.FixtureRequest) -> str:
    """The URL of a database of each kind whose outbox tables are empty."""
    return request.getfixturevalue(f"{request.param}_installed_url")


@pytest.fixture
def database(installed_url: str) -> Iterator[Database]:
    """A database of each kind whose outbox tables are empty."""
    with open_database(installed_url, init=False) as database:
        yield database


@pytest.fixture
def outbox(installed_url: str) -> Iterator[Outbox]:
    """The outbox of an app whose broker is away, on a database of each kind."""
    with open_outbox(installed_url, init=False) as outbox:
        yield outbox


@pytest.fixture
def recorded(outbox: Outbox) -> Database:
    """What is in the database of ``outbox``."""
    return Database(outbox.engine, outbox.tables)
