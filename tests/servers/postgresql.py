"""A private PostgreSQL, or the one that the environment names."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import URL, create_engine, make_url, text
from sqlalchemy.pool import NullPool

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.startup import wait_until_ready
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


class Postgresql:
    """A server in which each test has a database of its own.

    :param url: of a database whose user may create databases.
    :param process: the server, when it is a private one.
    :param run: starts a private one.
    """

    def __init__(
        self,
        url: URL,
        process: ProcessGroup | None = None,
        run: Callable[[], ProcessGroup] | None = None,
    ) -> None:
        self.url = url
        self.process = process
        self._run = run

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
        user = _unprivileged_user()
        folder = Path(tempfile.mkdtemp(prefix="outbox-postgresql-", dir=_open_folder()))
        watchdog.watch_folder(folder)
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        _create_cluster(programs, data, user)
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
        server = cls(url, run=run)
        server.start_again()
        return server

    def start_again(self) -> None:
        """Start a private server, after :meth:`stop` with what it had stored."""
        assert self._run is not None, "it is not a private server"
        self.process = self._run()
        wait_until_ready("PostgreSQL", self.process, self._answers)

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, name: str) -> None:
        """Drop a database, and with it the connections that are open to it."""
        self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def stop(self) -> None:
        """End a private server; leave any other alone."""
        if self.process is not None:
            # SIGINT is PostgreSQL's fast shutdown: it does not wait for clients.
            self.process.send(signal.SIGINT)
            try:
                self.process.wait(timeout=15)
            finally:
                self.process.kill()

    def _execute(self, statement: str) -> None:
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            connection.execute(text(statement))

    def _answers(self) -> bool:
        self._execute("SELECT 1")
        return True


def _find_programs() -> Path | None:
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.is_dir()]
    versions.sort(key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    candidates = versions + ([Path(on_path).parent] if on_path else [])
    return next((path for path in candidates if (path / "postgres").exists()), None)


def _unprivileged_user() -> str | None:
    """PostgreSQL refuses to run as root; return the user to run it as, or None for the own one."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def _open_folder() -> str:
    """Return the first of the usual temporary folders that every user can enter."""
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(folder).resolve()
        if all(part.stat().st_mode & 0o001 for part in (path, *path.parents)):
            return str(path)
    raise FileNotFoundError("no temporary folder is open to all users")


def _create_cluster(programs: Path, data: Path, user: str | None) -> None:
    entry = pwd.getpwnam(user) if user else None
    done = subprocess.run(
        [
            *(str(programs / "initdb"), "-D", str(data), "-U", "outbox", "-A", "trust"),
            *("--encoding=UTF8", "--no-locale", "--no-sync"),
        ],
        user=entry.pw_uid if entry else None,
        group=entry.pw_gid if entry else None,
        extra_groups=[] if entry else None,
        cwd=data.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"initdb failed:\n{done.stdout}")
