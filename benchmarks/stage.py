"""The servers and processes of one run; nothing of it is left behind."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.child import Child
from tests.processes import Processes
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import Rabbitmq
from tests.servers.redis import Redis
from tests.watchdog import Watchdog


@dataclass(frozen=True)
class Place:
    """Where one contender works, alone.

    Attributes:
        database: SQLAlchemy URL of a PostgreSQL database of its own.
        broker: URL of a RabbitMQ virtual host, or Redis database, of its own.
        runs: the file in which bodies leave a trace.
    """

    database: str
    broker: str
    runs: str

    @property
    def libpq(self) -> str:
        """The database's URL as libpq reads it."""
        return self.database.replace("+psycopg2", "", 1)

    @property
    def environment(self) -> dict[str, str]:
        """The same for programs."""
        return {
            "BENCH_DATABASE": self.database,
            "BENCH_LIBPQ": self.libpq,
            "BENCH_BROKER": self.broker,
            "BENCH_RUNS": self.runs,
        }


class Stage:
    """Servers, started when the first contender needs them.

    Arguments:
        stack: ends everything.
        watchdog: ends everything, when this process cannot.
        folder: for logs and traces.
    """

    def __init__(self, stack: ExitStack, watchdog: Watchdog, folder: Path) -> None:
        self._stack = stack
        self._watchdog = watchdog
        self._folder = folder
        self._numbers = itertools.count(1)
        self.processes = Processes(folder, watchdog)
        stack.callback(self.processes.close)

    @cached_property
    def postgresql(self) -> Postgresql:
        """PostgreSQL with its default durability: a commit waits for the disk."""
        server = Postgresql.start(self._watchdog)
        self._stack.callback(server.stop)
        return server

    @cached_property
    def rabbitmq(self) -> Rabbitmq:
        """RabbitMQ as it is installed."""
        server = Rabbitmq.start(self._watchdog)
        self._stack.callback(server.stop)
        return server

    @cached_property
    def redis(self) -> Redis:
        """Redis in memory."""
        server = Redis.start(self._watchdog)
        self._stack.callback(server.stop)
        return server

    @contextmanager
    def place(self, *, redis: bool = False) -> Iterator[Place]:
        """A fresh database and a fresh broker for one contender; gone after the block.

        Arguments:
            redis: the broker is a Redis.
        """
        name = f"outbox_bench_{os.getpid()}_{next(self._numbers)}"
        with ExitStack() as stack:
            database = self.postgresql.create_database(name)
            stack.callback(self.postgresql.drop_database, name)
            if redis:
                broker = self.redis.fresh_database()
            else:
                broker = self.rabbitmq.create_vhost(name)
                stack.callback(self.rabbitmq.delete_vhost, name)
            yield Place(database, broker, str(self._folder / f"{name}.runs"))

    @contextmanager
    def child(self, kind: str, *arguments: Any) -> Iterator[Child]:
        """An object in a process of its own; ended after the block."""
        child = Child(kind, *arguments)
        try:
            yield child
        finally:
            child.close()


@contextmanager
def open_stage() -> Iterator[Stage]:
    """A stage; everything on it is ended and removed after the block."""
    with (
        Watchdog() as watchdog,
        tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder,
        ExitStack() as stack,
    ):
        yield Stage(stack, watchdog, Path(folder))
