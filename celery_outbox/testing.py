"""For users' own tests: kill a real process at a named point and see that nothing is lost.

A process that is to die calls :func:`kill_at_environment` when it starts; the test starts it
with ``OUTBOX_FAULT`` set. Without that variable nothing happens, and nothing in the package
itself knows about faults.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

#: Where :func:`kill_at_environment` reads the boundary, the job and the marker file from.
VARIABLE, JOB_VARIABLE, ONCE_VARIABLE = "OUTBOX_FAULT", "OUTBOX_FAULT_JOB", "OUTBOX_FAULT_ONCE"

JobIds = Callable[[tuple[Any, ...]], Collection[str]]


@dataclass(frozen=True)
class Boundary:
    """A point at which a process can be killed.

    Attributes:
        target: the function at it, as ``module:Class.name`` or ``module:name``.
        after: whether the process dies after the function has returned, or before it is called.
        jobs: the ids of the jobs that a call of the function is about.
    """

    target: str
    after: bool
    jobs: JobIds


def _batch(arguments: tuple[Any, ...]) -> Collection[str]:
    """``Dispatcher._sort_out(self, batch, claim)`` and ``Dispatcher._settle(self, batch, ...)``."""
    return [message.job_id for message in arguments[1]]


def _attempt(arguments: tuple[Any, ...]) -> Collection[str]:
    """Methods of ``Attempt`` and of ``BodyTransaction``."""
    return [arguments[0].job_id]


def _recorded(arguments: tuple[Any, ...]) -> Collection[str]:
    """``Recorder._insert(self, connection, new)`` and ``Recorder._write(self, new, ...)``."""
    return [part.id for part in arguments if hasattr(part, "result_key") and hasattr(part, "id")]


#: Every boundary by its name, in the order in which a job meets them.
BOUNDARIES: dict[str, Boundary] = {
    "record.before_commit": Boundary(
        "celery_outbox.record.recorder:Recorder._insert", True, _recorded
    ),
    "record.after_commit": Boundary(
        "celery_outbox.record.recorder:Recorder._write", True, _recorded
    ),
    "dispatch.after_claim": Boundary(
        "celery_outbox.dispatch.dispatcher:Dispatcher._sort_out", False, _batch
    ),
    "dispatch.before_publish": Boundary(
        "celery_outbox.dispatch.dispatcher:Dispatcher._sort_out", True, _batch
    ),
    "dispatch.before_mark": Boundary(
        "celery_outbox.dispatch.dispatcher:Dispatcher._settle", False, _batch
    ),
    "dispatch.after_mark": Boundary(
        "celery_outbox.dispatch.dispatcher:Dispatcher._settle", True, _batch
    ),
    "execute.on_delivery": Boundary(
        "celery_outbox.execute.guard:Guard.trace", False, lambda arguments: [arguments[3]]
    ),
    "execute.after_claim": Boundary(
        "celery_outbox.execute.attempt:Attempt.execute", False, _attempt
    ),
    "execute.before_commit": Boundary(
        "celery_outbox.execute.transaction:BodyTransaction._commit", False, _attempt
    ),
    "execute.after_commit": Boundary(
        "celery_outbox.execute.transaction:BodyTransaction._commit", True, _attempt
    ),
    "execute.before_settle": Boundary(
        "celery_outbox.execute.attempt:Attempt._settle", False, _attempt
    ),
    "execute.after_settle": Boundary(
        "celery_outbox.execute.attempt:Attempt._settle", True, _attempt
    ),
}


def kill_at(boundary: str, job_id: str | None = None, once: Path | None = None) -> None:
    """Make this process die by SIGKILL at a boundary.

    Arguments:
        boundary: one of :data:`BOUNDARIES`.
        job_id: only when it is about this job; ``None``: about any.
        once: a file that is made before the process dies; where it exists, nothing happens,
            so that a restarted process lives.

    Raises:
        KeyError: there is no such boundary.
    """
    point = BOUNDARIES[boundary]
    module, _, path = point.target.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        concerned = job_id is None or job_id in point.jobs(args)
        if concerned and not point.after:
            _die(once)
        result = original(*args, **kwargs)
        if concerned and point.after:
            _die(once)
        return result

    setattr(owner, name, wrapped)


def kill_at_environment() -> None:
    """:func:`kill_at` as the environment says: ``OUTBOX_FAULT`` (a boundary), ``OUTBOX_FAULT_JOB``
    (a job id) and ``OUTBOX_FAULT_ONCE`` (a marker file)."""
    boundary = os.environ.get(VARIABLE)
    if boundary:
        once = os.environ.get(ONCE_VARIABLE)
        kill_at(boundary, os.environ.get(JOB_VARIABLE), Path(once) if once else None)


def _die(once: Path | None) -> None:
    if once is not None:
        try:
            once.touch(exist_ok=False)
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
