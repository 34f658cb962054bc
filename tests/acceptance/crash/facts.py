"""What a row of the matrix was observed to do on one broker, and where that is committed.

Facts hold nothing that differs from run to run: no times, process ids or tokens.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

#: The committed facts: broker -> row -> facts.
FILE = Path(__file__).with_name("observed.json")

#: Set it, and a run writes what it observed, and the page, instead of comparing.
WRITE = "OUTBOX_WRITE_DOCS"

#: The kinds of broker, by the names that the page has for them.
BROKERS = {
    "rabbitmq-classic": "RabbitMQ, classic queues",
    "rabbitmq-quorum": "RabbitMQ, quorum queues",
    "redis": "Redis",
}


@dataclass(frozen=True)
class Facts:
    """Of one row on one broker.

    Attributes:
        found: the state of the job at the moment of death; ``None``: no such job.
        found_attempts: its attempts then.
        found_rows: rows that were still to be published, then.
        found_messages: messages in the broker that nobody had acknowledged, then.
        found_copies: messages in the quarantine queue, then.
        end: the state of the job in the end.
        attempts: its attempts.
        runs: how often its body was entered.
        effects: effects on the other side, of this job.
        copies: messages in the quarantine queue.
    """

    found: str | None
    found_attempts: int
    found_rows: int
    found_messages: int
    found_copies: int
    end: str
    attempts: int
    runs: int
    effects: int
    copies: int


Observed = dict[str, dict[str, Facts]]


def committed() -> Observed:
    """What the last complete run observed."""
    if not FILE.exists():
        return {}
    return {
        broker: {row: Facts(**facts) for row, facts in rows.items()}
        for broker, rows in json.loads(FILE.read_text()).items()
    }


def writes() -> bool:
    """Whether this run is to write what it observes."""
    return bool(os.environ.get(WRITE))


def write(broker: str, rows: Mapping[str, Facts]) -> None:
    """Put facts into the committed file; other test processes may be at it, too."""
    folder = os.open(FILE.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        everything = committed()
        everything[broker] = {**everything.get(broker, {}), **rows}
        plain = {
            name: {row: asdict(facts) for row, facts in sorted(found.items())}
            for name, found in sorted(everything.items())
        }
        FILE.write_text(json.dumps(plain, indent=1) + "\n")
    finally:
        os.close(folder)
