"""The plans of the statements that really ran, as the server itself saw them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from benchmarks.stage import Place, Stage

#: Of PostgreSQL's own module for it (documentation, appendix F, auto_explain).
_SETTINGS = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_analyze": "on",
    "auto_explain.log_buffers": "on",
    "auto_explain.log_timing": "off",
}

#: Characters of a line of a plan.
LONGEST = 400

_PLAN = re.compile(r"duration: [\d.]+ ms  plan:\n((?:\t.*\n)+)")
_NUMBERS = re.compile(r"'[^']*'|\b\d+\b")


class Plans:
    """The plans that a block has made the server write down.

    Attributes:
        found: a plan for each kind of statement, with the pages that it touched.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def scans(self) -> list[str]:
        """Lines that read a whole table of ours."""
        lines = [line.strip() for plan in self.found for line in plan.splitlines()]
        return [
            line for line in lines if re.search(r"Seq Scan on outbox_(job|message|event)", line)
        ]


@contextmanager
def explained(stage: Stage, place: Place) -> Iterator[Plans]:
    """Collect the plans of everything that new connections do in this database; none from a server
    whose log is not here."""
    plans = Plans()
    log = stage.postgresql.log
    if log is None:
        yield plans
        return
    _set(place, _SETTINGS)
    try:
        yield plans
    finally:
        _set(place, dict.fromkeys(_SETTINGS))
    kinds: dict[str, str] = {}
    written = (stage.postgresql.log or "")[len(log) :]
    for plan in _PLAN.findall(written):
        statement = plan.partition("\n\t")[0]
        if "outbox_" in statement:
            kinds.setdefault(_NUMBERS.sub("?", statement)[:300], plan)
    plans.found = [_readable(plan) for plan in kinds.values()]


def _readable(plan: str) -> str:
    """Without the lists of 500 ids."""
    lines = plan.replace("\n\t", "\n").strip().splitlines()
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]} ..." for line in lines)


def _set(place: Place, settings: dict[str, str] | dict[str, None]) -> None:
    engine = create_engine(place.database, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        for setting, value in settings.items():
            change = f"RESET {setting}" if value is None else f"SET {setting} = '{value}'"
            connection.execute(text(f'ALTER DATABASE "{name}" {change}'))
