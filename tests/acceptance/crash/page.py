"""Writes docs/crash-matrix.rst out of the table and of what was observed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tests.acceptance.crash.facts import BROKERS, Facts, Observed
from tests.acceptance.crash.scenarios import Scenario, Stage
from tests.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "crash-matrix.rst"

#: Characters of a line.
WIDTH = 100

HEAD = """\
..
   Written by tests/acceptance/test_crash_matrix.py; it says how.

What if it dies here?
=====================

Every row of these tables is a test. A real process is killed with SIGKILL at the boundary that the
row names, with one job on its way; then a dispatcher and a worker go on. Each runs on RabbitMQ with
classic queues, on RabbitMQ with quorum queues and on Redis, over PostgreSQL. "Found" is what the
database and the broker held at the moment of death: the job's state, the outbox rows that were
still to be published, and the messages in the broker that nobody had acknowledged. Where brokers
differ, the row says so.

After every one of these deaths the tests also see that

- the job has ended, within its attempts, and no one holds it;
- a job that has succeeded has exactly one result and exactly one effect;
- its journal has no gaps: each step starts where the one before it ended, and attempts are counted
  one by one;
- no outbox row is left to be published, and no message is left in the broker, ready or
  unacknowledged;
- the quarantine queue holds what the row says, and ``quarantine list`` shows one job or none.

The names in brackets are those of ``celery_outbox.testing.BOUNDARIES``: with ``kill_at``, or with
``kill_at_environment`` and the variable ``OUTBOX_FAULT``, your own tests kill your own processes
there.

The body in these tests makes an effect on another side that knows ``self.idempotency_key``, and
returns ``self.write_result(...)``. A body whose effects have no such key makes them once per run.
The effect of a transactional body is a row of the application's.
"""

_COLUMNS = ("It dies here", "Found", "Then", "In the end")


def render(scenarios: Sequence[Scenario], observed: Observed) -> str:
    """The page as reStructuredText."""
    parts = [HEAD]
    for stage in Stage:
        rows = [scenario for scenario in scenarios if scenario.stage is stage]
        parts += [f"\n{stage.value}\n{'-' * len(stage.value)}\n", _table(rows, observed)]
    return "\n".join(parts)


def _table(rows: Sequence[Scenario], observed: Observed) -> str:
    lines = [".. list-table::", "   :header-rows: 1", "   :widths: 30 22 30 18", ""]
    lines += _row(_COLUMNS)
    for scenario in rows:
        by_broker = {
            broker: observed[broker][scenario.name]
            for broker in BROKERS
            if scenario.name in observed.get(broker, {})
        }
        found = _where({broker: _found(facts) for broker, facts in by_broker.items()})
        end = _where({broker: _end(facts) for broker, facts in by_broker.items()})
        boundaries = ", ".join(f"``{name}``" for name in scenario.death.boundaries)
        lines += _row((f"{scenario.here} ({boundaries})", found, scenario.then, end))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> list[str]:
    lines = []
    for number, cell in enumerate(cells):
        start = "   * - " if number == 0 else "     - "
        lines += textwrap.wrap(
            cell,
            WIDTH,
            initial_indent=start,
            subsequent_indent=" " * 7,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _where(texts: dict[str, str]) -> str:
    """A text for all brokers; where they differ, each with its brokers."""
    brokers_of: dict[str, list[str]] = {}
    for broker, text in texts.items():
        brokers_of.setdefault(text, []).append(BROKERS[broker])
    if len(brokers_of) == 1:
        return next(iter(brokers_of))
    return " ".join(f"{' and '.join(names)}: {text}" for text, names in brokers_of.items())


def _found(facts: Facts) -> str:
    state = "No job" if facts.found is None else f"``{facts.found}``"
    if facts.found_attempts:
        state += f" in attempt {facts.found_attempts}"
    parts = [
        state,
        _count(facts.found_rows, "row") + " to publish",
        _count(facts.found_messages, "message") + " in the broker",
    ]
    if facts.found_copies:
        parts.append(_count(facts.found_copies, "message") + " in the quarantine queue")
    return ", ".join(parts) + "."


def _end(facts: Facts) -> str:
    parts = [
        f"``{facts.end}``",
        _count(facts.attempts, "attempt"),
        f"body entered {_TIMES.get(facts.runs, f'{facts.runs} times')}",
        _count(facts.effects, "effect"),
    ]
    if facts.copies:
        parts.append(_count(facts.copies, "message") + " in the quarantine queue")
    return ", ".join(parts) + "."


_TIMES = {0: "never", 1: "once", 2: "twice"}


def _count(number: int, what: str) -> str:
    words = {0: "no", 1: "one", 2: "two", 3: "three"}
    return f"{words.get(number, number)} {what}{'' if number == 1 else 's'}"
