"""A private PgBouncer before a PostgreSQL."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, make_url, text
from sqlalchemy.pool import NullPool

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.sql_server import open_folder, unprivileged_user
from tests.servers.startup import wait_until_ready
from tests.watchdog import Watchdog


class Pgbouncer:
    """Shares few connections to a database among many clients.

    :param port: where it listens, on the loopback interface.
    :param process: the program.
    """

    def __init__(self, port: int, process: ProcessGroup) -> None:
        self.port = port
        self.process = process

    @classmethod
    def to(cls, url: str, watchdog: Watchdog, *, mode: str, connections: int) -> Pgbouncer:
        """Start one before the server of a SQLAlchemy URL.

        :param mode: how long a client keeps a connection: ``transaction`` or ``session``.
        :param connections: how many there are.
        :raises MissingServer: it is not installed and cannot be.
        """
        program = find_or_install(_find_program, package="pgbouncer", variable="PATH")
        target = make_url(url)
        folder = Path(tempfile.mkdtemp(prefix="outbox-pgbouncer-", dir=open_folder()))
        watchdog.watch_folder(folder)
        port = free_port()
        users = folder / "users.txt"
        users.write_text(f'"{target.username}" "{target.password or ""}"\n')
        configuration = folder / "pgbouncer.ini"
        configuration.write_text(
            "[databases]\n"
            f"* = host={target.host} port={target.port or 5432}\n"
            "[pgbouncer]\n"
            "listen_addr = 127.0.0.1\n"
            f"listen_port = {port}\n"
            "unix_socket_dir =\n"
            "auth_type = trust\n"
            f"auth_file = {users}\n"
            f"pool_mode = {mode}\n"
            f"default_pool_size = {connections}\n"
        )
        user = unprivileged_user("postgres")
        if user:
            for path in (folder, users, configuration):
                shutil.chown(path, user)
        process = ProcessGroup(
            [program, str(configuration)],
            log=folder / "server.log",
            watchdog=watchdog,
            cwd=folder,
            user=user,
        )
        pooler = cls(port, process)
        wait_until_ready("PgBouncer", process, lambda: _answers(pooler.url_for(url)))
        return pooler

    def url_for(self, url: str) -> str:
        """The SQLAlchemy URL of a database, through the pooler."""
        here = make_url(url).set(host="127.0.0.1", port=self.port)
        return here.render_as_string(hide_password=False)

    def stop(self) -> None:
        """End it."""
        self.process.kill()


def _find_program() -> str | None:
    return shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")


def _answers(url: str) -> bool:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    return True
