"""Where the demonstration kills a process: a list of named boundaries, each for one job.

Every process of the demonstration has the same list. It dies at a boundary of the list when it
gets there with that very job, and at no other time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from celery_outbox.testing import BOUNDARIES, Boundary, kill_at

VARIABLE = "EXAMPLE_FAULTS"


@dataclass(frozen=True)
class Fault:
    """One place to die at.

    Attributes:
        boundary: a name of :data:`celery_outbox.testing.BOUNDARIES`.
        job_id: the job that it is about.
        once: a file that is made by the first death and prevents a second.
        attempt: die only in this attempt of the job; ``None``: in any.
    """

    boundary: str
    job_id: str
    once: str
    attempt: int | None = None


def as_environment(faults: Sequence[Fault]) -> dict[str, str]:
    """The variable from which another process reads the list."""
    return {VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def arm(environment: Mapping[str, str] = os.environ) -> None:
    """Make this process die where the environment says; nowhere, if it says nothing."""
    for entry in json.loads(environment.get(VARIABLE, "[]")):
        fault = Fault(**entry)
        name = fault.boundary
        if fault.attempt is not None:
            name = f"{fault.boundary} of attempt {fault.attempt}"
            BOUNDARIES[name] = _only_in(fault.attempt, BOUNDARIES[fault.boundary])
        kill_at(name, fault.job_id, Path(fault.once))


def _only_in(attempt: int, boundary: Boundary) -> Boundary:
    """A boundary of the ``execute`` stage, narrowed to one attempt."""

    def jobs(arguments: tuple[Any, ...]) -> Collection[str]:
        return boundary.jobs(arguments) if arguments[0].number == attempt else ()

    return replace(boundary, jobs=jobs)
