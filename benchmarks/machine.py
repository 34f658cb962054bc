"""On what, and with what, a run was made."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.peers import version_of

#: Distributions whose versions belong to a figure.
DISTRIBUTIONS = (
    *("celery-outbox", "celery", "kombu", "amqp", "SQLAlchemy", "psycopg2-binary", "psycopg"),
    *("django-celery-outbox", "Django", "procrastinate", "pgqueuer", "asyncpg", "redis"),
)


def describe() -> dict[str, object]:
    """The machine and the versions, as plain values."""
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gb": round(_memory() / 1e9, 1),
            "system": platform.platform(),
            "load_at_start": [round(each, 2) for each in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version for name in DISTRIBUTIONS if (version := version_of(name))},
        },
    }


def _cpu() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
