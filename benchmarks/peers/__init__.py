"""The contenders, each set up as its own documentation says; one module for each.

Each class lives in a process of its own (:mod:`benchmarks.child`) and imports its library there, so
this package can be read where none of them is installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

#: What each peer needs: the modules, and the distributions whose versions are told.
NEEDS = {
    "django-celery-outbox": (("django_celery_outbox", "django", "psycopg"), "django-celery-outbox"),
    "procrastinate": (("procrastinate", "psycopg", "psycopg_pool"), "procrastinate"),
    "pgqueuer": (("pgqueuer", "psycopg", "asyncpg"), "pgqueuer"),
}


def is_installed(peer: str) -> bool:
    """Whether everything that a peer needs is there."""
    return all(find_spec(module) is not None for module in NEEDS[peer][0])


def version_of(distribution: str) -> str | None:
    """The installed version, or ``None``."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
