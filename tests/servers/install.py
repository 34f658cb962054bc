"""Finding a server's programs, and installing them where that is possible."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

TIME_LIMIT = 900
"""Seconds that one call of apt-get may take."""

LOCK = Path("/run/lock/celery-outbox-tests.lock")
"""Held while packages are installed; only root gets that far."""

POLICY = Path("/usr/sbin/policy-rc.d")
"""Asked by Debian's packages before they start a service; exit code 101 forbids it."""


class MissingServer(Exception):
    """A server that a test needs is not installed and cannot be installed from here."""


def find_or_install(find: Callable[[], T | None], *, package: str, variable: str) -> T:
    """Return what ``find`` returns, after installing the Debian package if need be.

    :param find: returns the program's place, or None when it is not installed.
    :param package: the Debian package that has it.
    :param variable: the environment variable that names a server in its place.
    :raises MissingServer: the message has the command to type.
    """
    found = find()
    if found is not None:
        return found
    command = f"apt-get install -y --no-install-recommends {package}"
    advice = f"Install it (Debian, Ubuntu: sudo {command}) or set {variable}; see CONTRIBUTING.rst."
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingServer(f"{package} is not installed. {advice}")
    with _one_at_a_time():
        # Another test process may have installed it while this one waited.
        found = find()
        if found is None:
            with _no_service_started():
                _run("apt-get update", advice)
                _run(command, advice)
            found = find()
    if found is None:
        raise MissingServer(f"{package} was installed, but its programs were not found. {advice}")
    return found


def _run(command: str, advice: str) -> None:
    try:
        done = subprocess.run(
            [*command.split(), "-o", "DPkg::Lock::Timeout=300"],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingServer(f"{command!r} took over {TIME_LIMIT} s. {advice}") from error
    if done.returncode != 0:
        raise MissingServer(f"{command!r} failed. {advice} Its output:\n{done.stdout[-4000:]}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock that the test processes share: two calls of apt-get at once fail."""
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _no_service_started() -> Iterator[None]:
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
