"""The fixtures that all tests share: databases, brokers, processes, proxies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from celery import _state

import celery_outbox  # noqa: F401 - registers with Celery once, before any test
from tests.processes import Processes
from tests.proxy import Proxy
from tests.servers.install import MissingServer
from tests.servers.mariadb import Mariadb
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import Rabbitmq, RabbitmqApi
from tests.servers.redis import Redis
from tests.servers.sql_server import SqlServer
from tests.watchdog import Watchdog

Server = TypeVar("Server", Mariadb, Postgresql, Rabbitmq, Redis)

_numbers = itertools.count(1)


def _fresh_name() -> str:
    """Return a name that neither this run nor another run on the same server uses."""
    return f"outbox_test_{os.getpid()}_{next(_numbers)}"


@pytest.fixture(autouse=True)
def _keep_shared_tasks_apart() -> Iterator[None]:
    """Forget the tasks that a test's modules share with all apps, later tests' apps among them."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.clear()
    _state._on_app_finalizers.update(before)


@pytest.fixture(scope="session")
def watchdog() -> Iterator[Watchdog]:
    """Ends everything that the tests started, even when pytest is killed."""
    with Watchdog() as watchdog:
        yield watchdog


@pytest.fixture(scope="session")
def postgresql_server(watchdog: Watchdog) -> Iterator[Postgresql]:
    """One PostgreSQL for all tests, started when the first one asks."""
    yield from _serve(Postgresql, watchdog)


@pytest.fixture(scope="session")
def mariadb_server(watchdog: Watchdog) -> Iterator[Mariadb]:
    """One MariaDB for all tests, started when the first one asks."""
    yield from _serve(Mariadb, watchdog)


@pytest.fixture(scope="session")
def rabbitmq_server(watchdog: Watchdog) -> Iterator[Rabbitmq]:
    """One RabbitMQ for all tests, started when the first one asks."""
    yield from _serve(Rabbitmq, watchdog)


@pytest.fixture(scope="session")
def redis_server(watchdog: Watchdog) -> Iterator[Redis]:
    """One Redis for all tests, started when the first one asks."""
    yield from _serve(Redis, watchdog)


def _serve(kind: type[Server], watchdog: Watchdog) -> Iterator[Server]:
    try:
        server = kind.start(watchdog)
    except MissingServer as error:
        # A failure, not a skip: a test that did not run has proved nothing.
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.stop()


def _lend(server: SqlServer) -> Iterator[str]:
    name = _fresh_name()
    yield server.create_database(name)
    server.drop_database(name)


@pytest.fixture
def postgresql_url(postgresql_server: Postgresql) -> Iterator[str]:
    """The SQLAlchemy URL of an empty database, dropped after the test."""
    yield from _lend(postgresql_server)


@pytest.fixture
def mariadb_url(mariadb_server: Mariadb) -> Iterator[str]:
    """The SQLAlchemy URL of an empty database, dropped after the test."""
    yield from _lend(mariadb_server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The SQLAlchemy URL of a file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'outbox.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database of each kind; one kind with ``indirect`` parameters."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def rabbitmq_api(rabbitmq_server: Rabbitmq) -> Iterator[RabbitmqApi]:
    """An empty virtual host, to be asked and disturbed; deleted after the test."""
    name = _fresh_name()
    yield RabbitmqApi(rabbitmq_server, name, rabbitmq_server.create_vhost(name))
    rabbitmq_server.delete_vhost(name)


@pytest.fixture
def rabbitmq_url(rabbitmq_api: RabbitmqApi) -> str:
    """The broker URL of an empty virtual host, the one of ``rabbitmq_api``."""
    return rabbitmq_api.url


@pytest.fixture
def own_rabbitmq(request: pytest.FixtureRequest, watchdog: Watchdog) -> Iterator[Rabbitmq]:
    """A server that nobody else uses now: what a test does to all of it disturbs no other."""
    shared = request.getfixturevalue("rabbitmq_server")
    server = shared if shared.is_private else Rabbitmq.start(watchdog, private=True)
    yield server
    if server is not shared:
        server.stop()


@pytest.fixture
def own_vhost(own_rabbitmq: Rabbitmq) -> Iterator[str]:
    """The broker URL of an empty virtual host of ``own_rabbitmq``."""
    name = _fresh_name()
    yield own_rabbitmq.create_vhost(name)
    own_rabbitmq.delete_vhost(name)


@pytest.fixture
def blockable_vhost(
    own_rabbitmq: Rabbitmq, own_vhost: str
) -> Iterator[tuple[str, Callable[[float], None]]]:
    """A virtual host, and what sets the memory limit of its server."""
    yield own_vhost, own_rabbitmq.limit_memory
    own_rabbitmq.limit_memory(0.4)


@pytest.fixture
def redis_url(redis_server: Redis) -> str:
    """The URL of an empty logical database, for brokers and results alike."""
    return redis_server.fresh_database()


@dataclass(frozen=True)
class FilesystemBroker:
    """A broker that needs no server; its queues are folders."""

    broker_url: str
    transport_options: dict[str, object]


@pytest.fixture
def filesystem_broker(tmp_path: Path) -> FilesystemBroker:
    """A broker in ``tmp_path``, to be shared by all processes of a test."""
    folders = {name: tmp_path / "broker" / name for name in ("messages", "processed", "control")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return FilesystemBroker(
        "filesystem://",
        {
            # One process's outbox is the other's inbox.
            "data_folder_in": str(folders["messages"]),
            "data_folder_out": str(folders["messages"]),
            "processed_folder": str(folders["processed"]),
            "control_folder": str(folders["control"]),
            "store_processed": True,
        },
    )


@pytest.fixture
def processes(tmp_path: Path, watchdog: Watchdog) -> Iterator[Processes]:
    """Starts workers and other programs; those still alive are killed after the test."""
    processes = Processes(tmp_path, watchdog)
    yield processes
    processes.close()


@pytest.fixture
def proxy_to() -> Iterator[Callable[[str], Proxy]]:
    """Returns a proxy to the server of a URL; closed after the test."""
    proxies: list[Proxy] = []

    def proxy_to(url: str) -> Proxy:
        proxies.append(Proxy.to(url))
        return proxies[-1]

    yield proxy_to
    for proxy in proxies:
        proxy.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the processes of a failed test have printed."""
    report = yield
    processes = getattr(item, "funcargs", {}).get("processes")
    if report.failed and report.when == "call" and isinstance(processes, Processes):
        for process in processes.started:
            title = f"log of {process.log_path.stem} (pid {process.pid})"
            report.sections.append((title, process.tail()))
    return report
