"""What waking the dispatcher costs those who commit at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from benchmarks.child import Child
from benchmarks.contest import Contender, Say, compete
from benchmarks.results import FLOOR, OURS, UNIT, Section
from benchmarks.stage import Place, Stage

#: Seconds of each slice of a round.
SECONDS = {"quick": 0.5, "default": 1.0, "full": 4.0}

#: Processes, and recorders in each.
PROCESSES, THREADS = 4, 4

OFF = "outbox_notify off"
ON = "outbox_notify on"
ROW = "the row alone"
SILENT = "pg_notify does nothing"


def run(stage: Stage, size: str, rounds: int, say: Say) -> Section:
    """Measure it."""
    seconds = SECONDS[size]
    found = Section(
        "notify",
        f"notify: {PROCESSES * THREADS} concurrent recorders, a row and a call",
        "commits/s",
    )
    found.notes.append(
        f"{SILENT}: the database has a function of this name that returns at once in its search "
        "path, so that nothing is notified whatever the settings are"
    )
    variants: tuple[tuple[str, str, str, bool, dict[str, object], bool], ...] = (
        (OFF, UNIT, "with the setting", True, {"outbox_notify": False}, False),
        (ON, OURS, "with the default", True, {}, False),
        (SILENT, FLOOR, "with the default, and nothing to notify with", True, {}, True),
        (ROW, FLOOR, "no call", False, {}, False),
    )
    with ExitStack() as stack:
        contenders = []
        for name, role, does, calls, settings, silent in variants:
            place = stack.enter_context(stage.place())
            if silent:
                _silence(place)
            crowd = [
                stack.enter_context(
                    stage.child("benchmarks.peers.crowd:Crowd", place, THREADS, calls, settings)
                )
                for _ in range(PROCESSES)
            ]
            contenders.append(Contender(name, role, does, _measured(crowd, seconds), OFF))
        found.lines = compete(contenders, rounds, say, slices=1 if size == "quick" else 5)
    found.hold("commits with notify, beside those without", ON, OFF, 0.9)
    found.hold("commits with notify, where pg_notify does nothing", ON, SILENT, 0.9)
    return found


def _measured(crowd: Sequence[Child], seconds: float) -> Callable[[], float]:
    def run() -> float:
        with ThreadPoolExecutor(len(crowd)) as pool:
            done = list(pool.map(lambda child: child.call("commits", seconds), crowd))
        crowd[0].call("clean")
        return sum(done) / seconds

    return run


def _silence(place: Place) -> None:
    engine = create_engine(place.database, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        for statement in (
            "CREATE SCHEMA silent",
            "CREATE FUNCTION silent.pg_notify(text, text) RETURNS void LANGUAGE sql AS ''",
            f'ALTER DATABASE "{name}" SET search_path = public, silent, pg_catalog',
        ):
            connection.execute(text(statement))
