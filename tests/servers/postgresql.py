"""A private PostgreSQL, or the one that the environment names."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path

from sqlalchemy import URL, make_url

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.sql_server import SqlServer, open_folder, run_as, unprivileged_user
from tests.watchdog import Watchdog

VARIABLE = "OUTBOX_TEST_POSTGRESQL_URL"

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "shared_buffers": "32MB",
    "max_connections": "200",
    "max_prepared_transactions": "10",
    "logging_collector": "off",
}


class Postgresql(SqlServer):
    """A server in which each test has a database of its own."""

    NAME = "PostgreSQL"
    # Its fast shutdown.
    STOP = signal.SIGINT

    @classmethod
    def start(cls, watchdog: Watchdog, *, private: bool = False) -> Postgresql:
        """Start a private server in a temporary folder, or take the one in the environment.

        :param private: start one in any case.
        :raises MissingServer: there is none and none can be installed.
        """
        named = os.environ.get(VARIABLE)
        if named and not private:
            url = make_url(named)
            if "+" not in url.drivername:
                url = url.set(drivername="postgresql+psycopg2")
            return cls(url)
        programs = find_or_install(_find_programs, package="postgresql", variable=VARIABLE)
        user = unprivileged_user("postgres")
        folder = Path(tempfile.mkdtemp(prefix="outbox-postgresql-", dir=open_folder()))
        watchdog.watch_folder(folder)
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        create = [str(programs / "initdb"), "-D", str(data), "-U", "outbox", "-A", "trust"]
        run_as(user, [*create, "--encoding=UTF8", "--no-locale", "--no-sync"], folder)
        port = free_port()
        options = [f"-c{name}={value}" for name, value in {**SETTINGS, "port": str(port)}.items()]
        run = partial(
            ProcessGroup,
            [str(programs / "postgres"), "-D", str(data), *options],
            log=folder / "server.log",
            watchdog=watchdog,
            cwd=folder,
            user=user,
        )
        url = URL.create("postgresql+psycopg2", "outbox", None, "127.0.0.1", port, "postgres")
        server = cls(url, run)
        server.start_again()
        return server

    def write_nothing_late(self) -> None:
        """Until :meth:`crash`, keep in memory what no commit of a private server waits for."""
        assert self._process is not None, "it is not a private server"
        writers = "backend_type IN ('walwriter', 'background writer')"
        for pid in self._column(f"SELECT pid FROM pg_stat_activity WHERE {writers}"):
            os.kill(pid, signal.SIGSTOP)

    def crash(self) -> None:
        """End a private server at once: what it had not written to its disk is gone."""
        # Its immediate shutdown; a kill would leave shared memory behind.
        self._end(signal.SIGQUIT)

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, name: str) -> None:
        """Drop a database, and with it the connections that are open to it."""
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def _find_programs() -> Path | None:
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.is_dir()]
    versions.sort(key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = versions + ([Path(on_path).parent] if on_path else [])
    return next((path for path in candidates if (path / "postgres").exists()), None)
