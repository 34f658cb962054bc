"""Real processes that are killed by SIGKILL at a named boundary, and start in milliseconds.

The boundaries are those of :mod:`celery_outbox.testing`. A matrix of deaths needs hundreds of
processes, and most of a process's start is the import of Celery: so these are forked from one
process that has imported everything and does nothing else. Each has a process group of its own, and
sets up its app after the fork, from its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from celery_outbox.testing import JOB_VARIABLE, ONCE_VARIABLE, VARIABLE
from tests.processes import REPOSITORY
from tests.wait import eventually
from tests.watchdog import Watchdog

#: What the processes would else import each for itself.
PRELOADED = (
    "billiard.popen_fork",
    "billiard.sharedctypes",
    "celery.app.amqp",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.app.routes",
    "celery.apps.worker",
    "celery.backends.base",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.events.receiver",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "celery_outbox.execute.request",
    "celery_outbox.execute.steps",
    "celery_outbox.hooks",
    "celery_outbox.operate.cli",
    "kombu.pidbox",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "psycopg2.extras",
    "sqlalchemy.dialects.postgresql.psycopg2",
)


def fault(*boundaries: str, job_id: str | None = None, once: Path | None = None) -> dict[str, str]:
    """The environment of a process that is to die at one of these boundaries.

    :param job_id: only when it is about this job.
    :param once: a file that the death makes, and that prevents another one.
    """
    environment = {VARIABLE: ",".join(boundaries)}
    if job_id is not None:
        environment[JOB_VARIABLE] = job_id
    if once is not None:
        environment[ONCE_VARIABLE] = str(once)
    return environment


class ForkServer:
    """The process from which the others are forked.

    :param watchdog: ends the processes when pytest cannot.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._lock = threading.Lock()
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )

    def start(
        self, target: str, *arguments: str, env: Mapping[str, str], log: Path
    ) -> ForkedProcess:
        """Start a process that calls a function.

        :param target: the function, as ``module:name``.
        :param arguments: its arguments.
        :param env: variables to set on top of the own environment.
        :param log: the file that gets its standard output and error.
        """
        log.touch()
        pid = self.ask(do="fork", target=target, arguments=arguments, env=dict(env), log=str(log))
        self._watchdog.watch_group(pid)
        return ForkedProcess(self, pid, log, [target, *arguments])

    def forget(self, pid: int) -> None:
        """Let a process that has ended go."""
        self._watchdog.forget_group(pid)
        self.ask(do="reap", pid=pid)

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process that forks; those it has started are not its own to end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class ForkedProcess:
    """A process and its children; made by :meth:`ForkServer.start`."""

    def __init__(self, server: ForkServer, pid: int, log: Path, what: Sequence[str]) -> None:
        self.pid = pid
        self._server = server
        self._log = log
        self._what = what
        self._returncode: int | None = None
        self._closed = False

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the signal that ended it, or ``None`` while it runs."""
        if self._returncode is None and not self._closed:
            self._returncode = self._server.ask(do="look", pid=self.pid)
        return self._returncode

    def log(self) -> str:
        """What it and its children have printed so far."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float = 60.0) -> int:
        """Wait until it has ended by itself; returns its exit code.

        :param timeout: in seconds.
        :raises AssertionError: it still runs at the deadline; the message has its log.
        """
        eventually(
            lambda: self.returncode is not None,
            deadline=timeout,
            message=lambda: f"{self._what} did not end; its log:\n{self.log()}\n",
        )
        assert self._returncode is not None
        return self._returncode

    def terminate(self) -> int:
        """Send it SIGTERM, wait until it has ended, and return its exit code."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)
        code = self.wait()
        self.kill()
        return code

    def kill(self) -> None:
        """Kill it and its children, at once. Harmless when repeated."""
        if self._closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self._closed = True
        self._server.forget(self.pid)


def _serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a process that was forked: its request."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if request["do"] == "fork":
            answer: int | None = os.fork()
            if not answer:
                return request
            # Also done by the process itself: whoever is first.
            with contextlib.suppress(PermissionError, ProcessLookupError):
                os.setpgid(answer, answer)
        elif request["do"] == "look":
            # Not reaped: its process id, which is the id of the group, stays its own.
            ended = os.waitid(os.P_PID, request["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            answer = None
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                answer = ended.si_status if exited else -ended.si_status
        else:
            answer = os.waitpid(request["pid"], 0)[0]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return None


def _become(request: dict[str, Any]) -> None:
    """Make a process of its own out of what was forked, and call the function."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    for descriptor, source in enumerate((nothing, log, log)):
        os.dup2(source, descriptor)
    os.environ.update(request["env"])
    os.chdir(Path(request["log"]).parent)
    module, _, name = request["target"].partition(":")
    getattr(import_module(module), name)(*request["arguments"])


def main() -> None:
    """Import everything once, then fork whenever somebody asks."""
    for module in PRELOADED:
        import_module(module)
    request = _serve()
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main()
