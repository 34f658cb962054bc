"""Programs whose clock is wrong."""

from __future__ import annotations

from pathlib import Path

from tests.servers.install import find_or_install


def wrong_clock(seconds: int) -> dict[str, str]:
    """Return the environment that makes a program's clock wrong by so many seconds.

    Waiting is not disturbed: the monotonic clock, which cannot be set, stays as it is.

    :raises MissingServer: libfaketime is not installed and cannot be.
    """
    library = find_or_install(_find_library, package="faketime", variable="LD_PRELOAD")
    return {
        "LD_PRELOAD": library,
        "FAKETIME": f"{seconds:+d}",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).with_name("wrong_clock")),
    }


def _find_library() -> str | None:
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return str(found[0]) if found else None
