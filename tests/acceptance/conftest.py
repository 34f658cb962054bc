"""The systems that acceptance tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.processes import Processes

SYSTEMS = ("sqlite-filesystem", "postgresql-rabbitmq", "postgresql-redis")


@pytest.fixture(params=SYSTEMS)
def system(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path
) -> Iterator[System]:
    """A database and a broker with the outbox tables made; each supported combination."""
    name = request.param
    folder = tmp_path / "shop"
    folder.mkdir()
    fixture = request.getfixturevalue
    if name == "sqlite-filesystem":
        broker = fixture("filesystem_broker")
        made = System(
            name,
            processes,
            folder,
            fixture("sqlite_url"),
            broker.broker_url,
            dict(broker.transport_options),
        )
    elif name == "postgresql-rabbitmq":
        made = System(name, processes, folder, fixture("postgresql_url"), fixture("rabbitmq_url"))
    else:
        made = System(
            name,
            processes,
            folder,
            fixture("postgresql_url"),
            fixture("redis_url"),
            {"visibility_timeout": 3},
        )
    yield made
    made.close()


on_rabbitmq = pytest.mark.parametrize("system", ["postgresql-rabbitmq"], indirect=True)

#: Celery's pools; eventlet is deprecated.
POOLS = ("prefork", "threads", "solo", "gevent")
