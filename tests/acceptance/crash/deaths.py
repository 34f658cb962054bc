"""How a process comes to its death: each of these leaves a bench as the death left it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_outbox.core.states import State
from tests.acceptance.crash.bench import JOB, NEIGHBOURS, Bench, armed, eventually


@dataclass(frozen=True)
class Death:
    """One way to die.

    :param boundaries: where, by the names of :data:`celery_outbox.testing.BOUNDARIES`; the last
        one is the death that the row is about.
    :param happen: brings a bench from nothing to the moment after the death.
    """

    boundaries: tuple[str, ...]
    happen: Callable[[Bench], None]


#: Settings with which the rows of a dead dispatcher are soon free.
SHORT_HOLD = {"outbox_publish_timeout": 3.0, "outbox_dispatch_lease": 6.0}

#: And with which a batch is published one by one, so that "in the middle" is one place.
ONE_BY_ONE = {**SHORT_HOLD, "outbox_dispatch_window": 1}

#: Settings with which a message that no worker claimed counts as lost after a second.
SOON_LOST = {"outbox_republish_after": 1.0}


def recording(boundary: str, role: str = "record") -> Death:
    """A web process dies; its caller asks again afterwards."""

    def die(bench: Bench) -> None:
        bench.dies(bench.start(role, "export", JOB, **armed(boundary)))

    return Death((boundary,), die)


def dispatching(boundary: str, *, in_batch: bool = False) -> Death:
    """A dispatcher dies; ``in_batch``: the job is in the middle of a batch of three."""

    def die(bench: Bench) -> None:
        first, last = NEIGHBOURS
        for job_id in (first, JOB, last) if in_batch else (JOB,):
            bench.shop.ask_for("export", job_id)
        bench.dies(bench.dispatcher(**armed(boundary)))

    return Death((boundary,), die)


def copying(boundary: str) -> Death:
    """A dispatcher dies that sends the copy of a failed job to the quarantine queue."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for("refuse", JOB, queue=bench.queues[1])
        bench.publish()
        worker = bench.worker()
        eventually(lambda: _state(bench) is State.QUARANTINED)
        bench.ends(worker)
        bench.dies(bench.dispatcher(**armed(boundary)))

    return Death((boundary,), die)


def working(boundary: str, task: str = "export") -> Death:
    """A worker dies, and its pool with it."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for(task, JOB)
        bench.publish()
        bench.dies(bench.worker(**armed(boundary)))

    return Death((boundary,), die)


def child(boundary: str, *, deliveries: int = 1) -> Death:
    """A process of the pool dies, once; the worker settles for it, and is ended in good order.

    :param deliveries: how often the job has been delivered when the worker has nothing to do.
    """

    def die(bench: Bench) -> None:
        bench.shop.ask_for("export", JOB)
        bench.publish()
        marker = bench.folder / "died"
        worker = bench.worker("prefork", **armed(boundary, once=marker))
        eventually(lambda: marker.exists() and _is_settled(bench, deliveries))
        bench.ends(worker)

    return Death((boundary,), die)


def every_child(boundary: str) -> Death:
    """Each process of the pool dies that gets the job; the worker lives, and is ended then."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for("export", JOB)
        dispatcher = bench.dispatcher()
        worker = bench.worker("prefork", **armed(boundary))
        eventually(lambda: _state(bench) is State.QUARANTINED)
        eventually(lambda: bench.in_quarantine() == 1 and bench.unpublished() == 0)
        bench.ends(worker)
        dispatcher.kill()

    return Death((boundary,), die)


def main_process(
    boundary: str, *, task: str = "export", of_child: str = "execute.in_body"
) -> Death:
    """A process of the pool dies, and then the main process that is to settle for it."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for(task, JOB)
        bench.publish()
        bench.dies(bench.worker("prefork", **armed(of_child, boundary)))

    return Death((of_child, boundary), die)


def time_limit(boundary: str) -> Death:
    """The main process dies that ends an attempt at its hard time limit."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for("slow", JOB)
        bench.publish()
        bench.dies(bench.worker("prefork", **armed(boundary)))

    return Death((boundary,), die)


def rescuing(boundary: str, task: str = "export") -> Death:
    """A worker dies, its lease ends, and maintenance dies over it."""

    def die(bench: Bench) -> None:
        working("execute.in_body", task).happen(bench)
        bench.lease_ends()
        _maintaining(bench, boundary)

    return Death((boundary,), die)


def expiring(boundary: str) -> Death:
    """A job's time is over before it is published, and maintenance dies over it."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for("export", JOB, expires=0.5)
        bench.has_expired()
        _maintaining(bench, boundary)

    return Death((boundary,), die)


def republishing(boundary: str) -> Death:
    """The broker loses a message, and maintenance dies over it."""

    def die(bench: Bench) -> None:
        bench.shop.ask_for("export", JOB)
        bench.publish()
        bench.lose_messages()
        bench.message_is_overdue()
        _maintaining(bench, boundary)

    return Death((boundary,), die)


def _maintaining(bench: Bench, boundary: str) -> None:
    bench.dies(bench.start("celery", "outbox", "maintain", **armed(boundary)))


def _state(bench: Bench) -> State | None:
    job = bench.job()
    return None if job is None else job.state


def _is_settled(bench: Bench, deliveries: int) -> bool:
    job = bench.job()
    assert job is not None
    return job.state in (State.RETRYING, State.SUCCEEDED) and job.deliveries == deliveries
