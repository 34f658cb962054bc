"""What private database servers have in common: their process, their user, their databases."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import URL, create_engine, text
from sqlalchemy.pool import NullPool

from tests.processes import ProcessGroup
from tests.servers.startup import wait_until_ready


class SqlServer:
    """A server in which each test has a database of its own.

    :param url: of a database whose user may create databases.
    :param run: starts a private one.
    """

    NAME: ClassVar[str]

    #: Asks a private one to end, without waiting for its clients.
    STOP: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, url: URL, run: Callable[[], ProcessGroup] | None = None) -> None:
        self.url = url
        self._process: ProcessGroup | None = None
        self._run = run

    def create_database(self, name: str) -> str:
        """Create an empty database and return its SQLAlchemy URL."""
        raise NotImplementedError

    def drop_database(self, name: str) -> None:
        """Drop a database, and with it the connections that are open to it."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Start a private server, after :meth:`stop` with what it had stored."""
        assert self._run is not None, "it is not a private server"
        self._process = self._run()
        wait_until_ready(self.NAME, self._process, self._answers)

    def stop(self) -> None:
        """End a private server; leave any other alone."""
        self._end(self.STOP)

    @property
    def log(self) -> str | None:
        """What a private server has written into its log, or None for any other."""
        return None if self._process is None else self._process.log()

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send(number)
            try:
                self._process.wait(timeout=30)
            finally:
                self._process.kill()

    def _column(self, question: str, **values: object) -> list[Any]:
        """The first column of what the server answers."""
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.connect() as connection:
            return list(connection.scalars(text(question), values))

    def _execute(self, statement: str, *, harmless: str = "") -> None:
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with engine.connect() as connection:
            try:
                connection.exec_driver_sql(statement)
            except Exception as error:
                if not harmless or harmless not in str(error):
                    raise

    def _answers(self) -> bool:
        self._execute("SELECT 1")
        return True


def unprivileged_user(wanted: str) -> str | None:
    """Return the user to run a server as that refuses to run as root, or None for the own one."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return wanted if wanted in names else "nobody"


def open_folder() -> str:
    """Return the first of the usual temporary folders that every user can enter."""
    for folder in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        path = Path(folder).resolve()
        if all(part.stat().st_mode & 0o001 for part in (path, *path.parents)):
            return str(path)
    raise FileNotFoundError("no temporary folder is open to all users")


def run_as(user: str | None, command: list[str], folder: Path) -> None:
    """Run a program to its end.

    :param user: whose process it is; None: the own one.
    :raises RuntimeError: it failed; the message has its output.
    """
    entry = pwd.getpwnam(user) if user else None
    done = subprocess.run(
        command,
        user=entry.pw_uid if entry else None,
        group=entry.pw_gid if entry else None,
        extra_groups=[] if entry else None,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout}")
