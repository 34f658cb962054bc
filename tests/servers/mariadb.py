"""A private MariaDB, or the server that the environment names, which may be a MySQL."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from sqlalchemy import URL, make_url

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.sql_server import SqlServer, run_as, unprivileged_user
from tests.watchdog import Watchdog

VARIABLE = "OUTBOX_TEST_MARIADB_URL"

SETTINGS = {
    "bind-address": "127.0.0.1",
    "skip-name-resolve": "1",
    "max-connections": "200",
    "innodb-buffer-pool-size": "64M",
    "max-allowed-packet": "64M",
    # What a killed server had committed is still there: the system keeps it.
    "innodb-flush-log-at-trx-commit": "2",
    # A server's default is not what the outbox needs: it must state what it needs by itself.
    "character-set-server": "latin1",
    "collation-server": "latin1_swedish_ci",
}


class Mariadb(SqlServer):
    """A server in which each test has a database of its own."""

    NAME = "MariaDB"

    @classmethod
    def start(cls, watchdog: Watchdog, *, private: bool = False) -> Mariadb:
        """Start a private server in a temporary folder, or take the one in the environment.

        :param private: start one in any case.
        :raises MissingServer: there is none and none can be installed.
        """
        named = os.environ.get(VARIABLE)
        if named and not private:
            return cls(make_url(named))
        programs = find_or_install(_find_programs, package="mariadb-server", variable=VARIABLE)
        user = unprivileged_user("mysql")
        folder = Path(tempfile.mkdtemp(prefix="outbox-mariadb-", dir="/tmp"))
        watchdog.watch_folder(folder)
        if user:
            shutil.chown(folder, user)
        data = folder / "data"
        create = [programs["mariadb-install-db"], "--no-defaults", f"--datadir={data}"]
        create += ["--auth-root-authentication-method=normal"]
        run_as(user, [*create, "--skip-test-db", "--skip-name-resolve"], folder)
        port = free_port()
        places = {
            "datadir": str(data),
            "socket": str(folder / "socket"),
            "pid-file": str(folder / "pid"),
            "port": str(port),
        }
        options = [f"--{name}={value}" for name, value in {**SETTINGS, **places}.items()]
        run = partial(
            ProcessGroup,
            [programs["mariadbd"], "--no-defaults", *options],
            log=folder / "server.log",
            watchdog=watchdog,
            cwd=folder,
            user=user,
        )
        url = URL.create("mariadb+pymysql", "root", None, "127.0.0.1", port, "mysql")
        server = cls(url, run)
        server.start_again()
        return server

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""
        self._execute(f"CREATE DATABASE `{name}`")
        return self.url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, name: str) -> None:
        """Drop a database, after ending the connections that are open to it."""
        self.kill_connections(name)
        self._execute(f"DROP DATABASE IF EXISTS `{name}`")

    def connections(self, name: str) -> list[int]:
        """Return the numbers of the connections that are open to a database."""
        return self._column(
            "SELECT id FROM information_schema.processlist WHERE db = :name", name=name
        )

    def kill_connections(self, name: str) -> int:
        """End the connections that are open to a database; return how many."""
        found = self.connections(name)
        for number in found:
            self._execute(f"KILL {number}", harmless="Unknown thread id")
        return len(found)

    def set_global(self, name: str, value: int) -> int:
        """Set a variable for the connections that are opened from now on; return its old value."""
        (before,) = map(int, self._column(f"SELECT @@GLOBAL.{name}"))
        self._execute(f"SET GLOBAL {name} = {value}")
        return before


def _find_programs() -> dict[str, str] | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/bin"])
    found = {name: shutil.which(name, path=path) for name in ("mariadbd", "mariadb-install-db")}
    return {name: place for name, place in found.items() if place} if all(found.values()) else None
