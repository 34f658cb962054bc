"""What the libraries under a dispatcher need of the memory, before it does anything."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

#: One after the other, each on top of those before.
STEPS = (
    ("Python", ()),
    ("Celery", ("celery", "celery.app.base", "kombu")),
    ("SQLAlchemy and psycopg2", ("sqlalchemy.orm", "psycopg2")),
    ("celery-outbox", ("celery_outbox", "celery_outbox.app", "celery_outbox.operate.cli")),
    ("Celery's command line", ("celery.bin.celery",)),
)


class Imports:
    """Imports, in a process that has not done so yet."""

    def sizes(self) -> dict[str, float]:
        """The resident set size after each step, in MB."""
        sizes = {}
        for name, modules in STEPS:
            for module in modules:
                import_module(module)
            sizes[name] = round(resident(os.getpid()), 1)
        # Celery's command line loads what others have put there: flower, for one.
        for point in entry_points(group="celery.commands"):
            if not point.module.startswith("celery_outbox"):
                point.load()
                sizes[f"the command {point.name}"] = round(resident(os.getpid()), 1)
        return sizes


def resident(pid: int) -> float:
    """The resident set size of a process, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} has no memory")
