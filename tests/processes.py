"""Real processes under test: workers, dispatchers, beat; and the servers they talk to."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.wait import eventually
from tests.watchdog import Watchdog

REPOSITORY = Path(__file__).resolve().parent.parent


class ProcessGroup:
    """A program and all its children, in a session of their own.

    :param argv: the program and its arguments.
    :param log: the file that gets its standard output and error.
    :param watchdog: ends it when pytest cannot.
    :param env: its whole environment; the own one by default.
    :param cwd: its working directory; the own one by default.
    :param user: the name of the user to run it as; the own one by default.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        watchdog: Watchdog,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: str | None = None,
    ) -> None:
        self.argv = list(argv)
        self.log_path = log
        self._watchdog = watchdog
        self._returncode: int | None = None
        entry = pwd.getpwnam(user) if user else None
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
                cwd=cwd,
                user=entry.pw_uid if entry else None,
                group=entry.pw_gid if entry else None,
                extra_groups=[] if entry else None,
            )
        self._closed = False
        watchdog.watch_group(self.pid)

    @property
    def pid(self) -> int:
        """The process id of the program; also the id of its process group."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The program's exit code, minus the signal that ended it, or None while it runs."""
        # The leader is looked at but not reaped, so that its process id, which is the id of the
        # group, cannot become another program's before the group is gone.
        if self._returncode is None and not self._closed:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                self._returncode = ended.si_status if exited else -ended.si_status
        return self._returncode

    @property
    def alive(self) -> bool:
        """Whether the program itself runs; its children are not considered."""
        return self.returncode is None

    def log(self) -> str:
        """What the program and its children have printed so far."""
        return self.log_path.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send a signal to the program alone, not to its children."""
        if self.alive:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait until the program has ended by itself.

        :param timeout: in seconds.
        :returns: its exit code, or minus the signal that ended it.
        :raises AssertionError: it still runs at the deadline; the message has its log.
        """
        eventually(
            lambda: not self.alive,
            deadline=timeout,
            interval=0.02,
            message=lambda: f"{self.argv} did not end; its log:\n{self.tail()}\n",
        )
        assert self._returncode is not None
        return self._returncode

    def terminate(self, timeout: float = 30.0) -> int:
        """Send SIGTERM to the program alone, which is a worker's warm shutdown, and wait.

        :param timeout: in seconds.
        :returns: the exit code.
        :raises AssertionError: it still runs at the deadline; it is left running.
        """
        self.send(signal.SIGTERM)
        code = self.wait(timeout)
        self.kill()
        return code

    def kill(self) -> None:
        """Kill the program and its children with SIGKILL, at once. Harmless when repeated."""
        if self._closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        eventually(lambda: not self.alive, deadline=10.0, interval=0.01)
        self._watchdog.forget_group(self.pid)
        self._closed = True
        self._process.wait()

    def tail(self, lines: int = 200) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log().splitlines()[-lines:])


class Processes:
    """The processes of one test.

    :param folder: where the logs go, and the default working directory.
    :param watchdog: ends them when pytest cannot.
    """

    def __init__(self, folder: Path, watchdog: Watchdog) -> None:
        self.folder = folder
        self.started: list[ProcessGroup] = []
        self._watchdog = watchdog

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
    ) -> ProcessGroup:
        """Start any program.

        :param argv: the program and its arguments.
        :param env: variables to set on top of the own environment.
        :param cwd: its working directory; the test's ``tmp_path`` by default.
        :param name: the first part of the log file's name.
        """
        name = name or Path(argv[0]).name
        process = ProcessGroup(
            argv,
            log=self.folder / f"{name}-{len(self.started)}.log",
            watchdog=self._watchdog,
            env=self._environment(env or {}),
            cwd=cwd or self.folder,
        )
        self.started.append(process)
        return process

    def python(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        name: str = "python",
    ) -> ProcessGroup:
        """Start ``python`` with these arguments; for the rest see :meth:`start`."""
        return self.start([sys.executable, *arguments], env=env, cwd=cwd, name=name)

    def celery(
        self,
        app: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
    ) -> ProcessGroup:
        """Start ``python -m celery -A app`` with these arguments; for the rest see :meth:`start`.

        :param app: what ``-A`` gets, such as ``tests.apps.shop``; found in ``cwd`` and in the
            repository.
        """
        name = name or next((part for part in arguments if not part.startswith("-")), "celery")
        return self.python("-m", "celery", "-A", app, *arguments, env=env, cwd=cwd, name=name)

    def answer(self, app: str, *arguments: str, env: Mapping[str, str]) -> Any:
        """Run ``celery -A app outbox ARGUMENTS --json`` to its end; return what it answered.

        :param env: see :meth:`start`.
        """
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", app, "outbox", *arguments, "--json"],
            cwd=REPOSITORY,
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # What it has to say beside is on the standard error stream.
        return json.loads(done.stdout)

    def close(self) -> None:
        """Kill all that are alive, the last one first."""
        for process in reversed(self.started):
            process.kill()

    def _environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **extra}
        paths = [str(REPOSITORY), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return environment
