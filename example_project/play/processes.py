"""The real processes: web server, dispatcher, worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that all processes together have to end after SIGTERM, before SIGKILL.
GRACE = 5.0


class Process:
    """One child process and its log."""

    def __init__(self, title: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.title = title
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def killed(self) -> bool:
        """Whether it ended by SIGKILL."""
        return self._process.poll() == -signal.SIGKILL

    def terminate(self) -> None:
        """Ask it to end in good order."""
        if not self.ended:
            self._process.terminate()

    def end(self, seconds: float) -> None:
        """Wait for its end; after ``seconds``, kill it."""
        try:
            self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def last_words(self, lines: int = 15) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-lines:]


class Processes:
    """Starts child processes, and ends all of them at the end of the ``with`` block.

    Arguments:
        logs: the folder for their logs.
        environment: what is set for them beside this process's environment.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.started: list[Process] = []
        self._logs = logs
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.environment = {**os.environ, "PYTHONPATH": path, **environment}

    def python(self, title: str, arguments: Sequence[str], handles: Sequence[int] = ()) -> Process:
        """Start ``python -m`` with these arguments, and with these open files."""
        name = f"{len(self.started) + 1:02}-{title}.log"
        with (self._logs / name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                pass_fds=handles,
            )
        self.started.append(Process(title, process, self._logs / name))
        return self.started[-1]

    def celery(self, title: str, *arguments: str) -> Process:
        """Start ``celery -A example_project.celery_app`` with these arguments."""
        return self.python(title, ["celery", "-A", "example_project.celery_app", *arguments])

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.started:
            process.terminate()
        end = time.monotonic() + GRACE
        for process in self.started:
            process.end(end - time.monotonic())
