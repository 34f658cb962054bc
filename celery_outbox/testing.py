"""For users' own tests: kill a real process at a named point and see that nothing is lost.

A process that is to die calls :func:`kill_at_environment` when it starts; the test starts it
with ``OUTBOX_FAULT`` set. Without that variable nothing happens, and nothing in the package
itself knows about faults. What happens after each death is in the documentation, "What if it dies
here?".

A body has two boundaries of its own, where it calls :func:`in_body` and :func:`after_effect`; it
calls them through the module (``testing.in_body(...)``), because that is where they are replaced.
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

#: Where :func:`kill_at_environment` reads the boundaries, the job and the marker file from.
VARIABLE, JOB_VARIABLE, ONCE_VARIABLE = "OUTBOX_FAULT", "OUTBOX_FAULT_JOB", "OUTBOX_FAULT_ONCE"

#: From the arguments of a call to the ids of its jobs; ``None``: it is about no single job.
JobIds = Callable[[tuple[Any, ...]], Collection[str] | None]


@dataclass(frozen=True)
class Boundary:
    """A point at which a process can be killed.

    Attributes:
        target: the function at it, as ``module:Class.name`` or ``module:name``; where there is
            one for each kind of broker, all of them, with spaces between.
        after: whether the process dies after the function has returned, or before it is called.
        jobs: the ids of the jobs that a call of the function is about; ``None``: the step as a
            whole, so that a process dies at it whatever job it is armed for.
    """

    target: str
    after: bool
    jobs: JobIds


def _batch(arguments: tuple[Any, ...]) -> Collection[str]:
    """Methods of the dispatcher's ``Batch``."""
    return [message.job_id for message in arguments[0].messages]


def _attempt(arguments: tuple[Any, ...]) -> Collection[str]:
    """Methods of ``Attempt`` and of ``BodyTransaction``."""
    return [arguments[0].job_id]


def _recorded(arguments: tuple[Any, ...]) -> Collection[str]:
    """``Recorder._insert`` and ``_keep(self, connection, new)``, and ``_write(self, new, ...)``."""
    return [part.id for part in arguments if hasattr(part, "result_key") and hasattr(part, "id")]


def _wire(arguments: tuple[Any, ...]) -> Collection[str]:
    """``_publish(..., wire)`` of the publishers."""
    return [arguments[-1].headers["id"]]


def _first(arguments: tuple[Any, ...]) -> Collection[str]:
    """:func:`in_body` and :func:`after_effect`."""
    return arguments[:1]


def _third(arguments: tuple[Any, ...]) -> Collection[str]:
    """``end_lost(guard, task, job_id, ...)``."""
    return arguments[2:3]


def _job(arguments: tuple[Any, ...]) -> Collection[str]:
    """``Maintenance._take_back(self, connection, job)`` and ``_end_overdue``."""
    return [arguments[2].id]


def _step(arguments: tuple[Any, ...]) -> None:
    """A step of maintenance, over all jobs."""


def in_body(job_id: str | None) -> None:
    """The boundary ``execute.in_body``: a body calls it where it has done nothing yet."""


def after_effect(job_id: str | None) -> None:
    """The boundary ``execute.after_effect``: a body calls it when its effect is done, and the
    job does not know."""


_MAINTENANCE = "celery_outbox.operate.maintenance:Maintenance."
_END_LOST = "celery_outbox.execute.request:end_lost"

#: Every boundary by its name, in the order in which a job meets them.
BOUNDARIES: dict[str, Boundary] = {
    "record.before_commit": Boundary(
        "celery_outbox.record.recorder:Recorder._insert"
        " celery_outbox.record.recorder:Recorder._keep",
        True,
        _recorded,
    ),
    "record.after_commit": Boundary(
        "celery_outbox.record.recorder:Recorder._write", True, _recorded
    ),
    "dispatch.after_claim": Boundary("celery_outbox.dispatch.batch:Batch.sort_out", False, _batch),
    "dispatch.before_publish": Boundary(
        "celery_outbox.dispatch.batch:Batch.sort_out", True, _batch
    ),
    # With its neighbours in the batch sent, as far as they come before it.
    "dispatch.mid_batch": Boundary(
        "celery_outbox.dispatch.amqp:AmqpPublisher._publish"
        " celery_outbox.dispatch.kombu:KombuPublisher._publish",
        False,
        _wire,
    ),
    # The broker has the message; its confirm is not read yet.
    "dispatch.before_confirm": Boundary(
        "celery_outbox.dispatch.publisher:Report.decide",
        False,
        lambda arguments: [arguments[1].headers["id"]],
    ),
    "dispatch.before_mark": Boundary("celery_outbox.dispatch.batch:Batch.settle", False, _batch),
    "dispatch.after_mark": Boundary("celery_outbox.dispatch.batch:Batch.settle", True, _batch),
    "execute.on_delivery": Boundary(
        "celery_outbox.execute.guard:Guard.trace", False, lambda arguments: [arguments[3]]
    ),
    "execute.after_claim": Boundary(
        "celery_outbox.execute.attempt:Attempt.execute", False, _attempt
    ),
    "execute.in_body": Boundary("celery_outbox.testing:in_body", False, _first),
    "execute.after_effect": Boundary("celery_outbox.testing:after_effect", False, _first),
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
    # The worker's main process settles for a pool process: a lost one, or a hard time limit.
    "main.before_settle": Boundary(_END_LOST, False, _third),
    "main.after_settle": Boundary(_END_LOST, True, _third),
    # "in": written, and not committed.
    "maintain.in_rescue": Boundary(_MAINTENANCE + "_take_back", True, _job),
    "maintain.after_rescue": Boundary(_MAINTENANCE + "_rescue_all", True, _step),
    "maintain.in_expire": Boundary(_MAINTENANCE + "_end_overdue", True, _job),
    "maintain.after_expire": Boundary(_MAINTENANCE + "_expire_all", True, _step),
    "maintain.in_republish": Boundary(
        _MAINTENANCE + "_note_republished", True, lambda arguments: arguments[2]
    ),
    "maintain.after_republish": Boundary(_MAINTENANCE + "_republish", True, _step),
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
    for target in point.target.split():
        _arm(target, point, job_id, once)


def _arm(target: str, point: Boundary, job_id: str | None, once: Path | None) -> None:
    module, _, path = target.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        concerned = job_id is None or _is_about(job_id, point.jobs(args))
        if concerned and not point.after:
            _die(once)
        result = original(*args, **kwargs)
        if concerned and point.after:
            _die(once)
        return result

    setattr(owner, name, wrapped)


def _is_about(job_id: str, jobs: Collection[str] | None) -> bool:
    return jobs is None or job_id in jobs


def kill_at_environment() -> None:
    """:func:`kill_at` as the environment says: ``OUTBOX_FAULT`` (boundaries, with commas between),
    ``OUTBOX_FAULT_JOB`` (a job id) and ``OUTBOX_FAULT_ONCE`` (a marker file, for all of them)."""
    once = os.environ.get(ONCE_VARIABLE)
    for boundary in filter(None, os.environ.get(VARIABLE, "").split(",")):
        kill_at(boundary, os.environ.get(JOB_VARIABLE), Path(once) if once else None)


def _die(once: Path | None) -> None:
    if once is not None:
        try:
            once.touch(exist_ok=False)
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
