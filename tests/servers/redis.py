"""A private Redis, or the one that the environment names."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from redis import Redis as Client

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.startup import wait_until_ready
from tests.watchdog import Watchdog

VARIABLE = "OUTBOX_TEST_REDIS_URL"


class Redis:
    """A server in which each test has a logical database of its own, in turn.

    :param url: of any database of the server.
    :param process: the server, when it is a private one.
    """

    def __init__(self, url: str, process: ProcessGroup | None = None) -> None:
        self.url = url
        self.process = process
        with Client.from_url(url) as client:
            databases = int(client.config_get("databases")["databases"])
        # A server from outside is shared by the processes of pytest-xdist: each has its own.
        own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        step = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self._numbers = itertools.cycle(range(1 + own, databases, step))

    @classmethod
    def start(cls, watchdog: Watchdog, *, private: bool = False) -> Redis:
        """Start a private server in a temporary folder, or take the one in the environment.

        :param private: start one in any case.
        :raises MissingServer: there is none and none can be installed.
        """
        named = os.environ.get(VARIABLE)
        if named and not private:
            return cls(named)
        program = find_or_install(
            lambda: shutil.which("redis-server"), package="redis-server", variable=VARIABLE
        )
        folder = Path(tempfile.mkdtemp(prefix="outbox-redis-"))
        watchdog.watch_folder(folder)
        port = free_port()
        process = ProcessGroup(
            [
                *(program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
                *("--save", "", "--appendonly", "no", "--databases", "256"),
            ],
            log=folder / "server.log",
            watchdog=watchdog,
            cwd=folder,
        )
        url = f"redis://127.0.0.1:{port}/0"
        wait_until_ready("Redis", process, lambda: _answers(url))
        return cls(url, process)

    def fresh_database(self) -> str:
        """Return the URL of the next logical database, flushed."""
        url = urlsplit(self.url)._replace(path=f"/{next(self._numbers)}").geturl()
        with Client.from_url(url) as client:
            client.flushdb()
        return url

    def stop(self) -> None:
        """End a private server; leave any other alone."""
        if self.process is not None:
            self.process.kill()


def _answers(url: str) -> bool:
    with Client.from_url(url) as client:
        return bool(client.ping())
