"""Nothing that the tests start may outlive them, not even when pytest itself is killed.

A separate process reads a pipe whose other end only pytest holds. When that end closes, for
whatever reason, it ends the process groups and removes the folders that are still on its list. A
parent-death signal would not do: it fires when the starting *thread* ends, and does not reach
grandchildren.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE = 3.0
"""Seconds between asking the leftovers to end and killing them."""


class Watchdog:
    """Ends what was left behind when this process is gone.

    Use it as a context manager; ``close`` ends what is still on the list, too.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch_group(self, group: int) -> None:
        """Put a process group on the list; its leader must not be reaped before it is forgotten."""
        self._tell(f"group {group}")

    def forget_group(self, group: int) -> None:
        """Take a process group off the list."""
        self._tell(f"forget {group}")

    def watch_folder(self, folder: Path) -> None:
        """Have a folder removed at the end."""
        self._tell(f"folder {folder}")

    def close(self) -> None:
        """End everything on the list and wait until that is done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()


def _signal(groups: set[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def _any_left(groups: set[int]) -> bool:
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, 0)
            return True
    return False


def main() -> None:
    """Keep the list until the pipe closes, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups.add(int(rest))
        elif word == "forget":
            groups.discard(int(rest))
        else:
            folders.append(rest)
    _signal(groups, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while _any_left(groups) and time.monotonic() < end:
        time.sleep(0.05)
    _signal(groups, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
