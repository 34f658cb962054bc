"""One code base before and after the swap of its base class, in real processes.

``MOVING_SIDE`` is what was deployed: ``old`` is Celery alone, ``new`` has the outbox. ``python -m
tests.acceptance.moving CALLS`` is a web process that makes some calls.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery import Celery, chord
from kombu import Queue

from celery_outbox import Outbox

FOLDER = Path(os.environ["MOVING_FOLDER"])
IS_NEW = os.environ["MOVING_SIDE"] == "new"

app = Celery(
    "moving",
    broker=os.environ["MOVING_BROKER"],
    backend=os.environ.get("MOVING_BACKEND"),
    task_cls="celery_outbox:OutboxTask" if IS_NEW else None,
)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_enable_remote_control = False
if IS_NEW:
    app.conf.outbox_database_url = os.environ["MOVING_DATABASE"]
    app.conf.update(json.loads(os.environ.get("MOVING_SETTINGS", "{}")))
    # The first is for new calls; those with a plus are declared with dead letters.
    names = os.environ.get("MOVING_QUEUES", "celery").split(",")
    outbox = Outbox(app)
    app.conf.task_queues = [
        outbox.queue(name[:-1]) if name.endswith("+") else Queue(name) for name in names
    ]
    app.conf.task_default_queue = names[0].removesuffix("+")


def note(what: str) -> None:
    """Leave a line that says who ran what, appended in one write."""
    with (FOLDER / "runs").open("a") as runs:
        runs.write(f"{os.environ['MOVING_SIDE']} {what}\n")


@app.task(name="moving.add")
def add(x: int, y: int) -> int:
    """Need the arguments."""
    note(f"add {x} {y}")
    return x + y


@app.task(name="moving.total")
def total(numbers: list[int]) -> int:
    """End a chord."""
    note(f"total {sorted(numbers)}")
    return sum(numbers)


@app.task(name="moving.clean")
def clean() -> None:
    """Need no arguments."""
    note("clean")


@app.task(name="moving.insist", bind=True, max_retries=4)
def insist(self: Any, until: int) -> int:
    """Ask for retries."""
    note(f"insist {self.request.retries}")
    if self.request.retries < until:
        raise self.retry(countdown=0.05)
    return int(self.request.retries)


@app.task(name="moving.refuse")
def refuse(reason: str) -> None:
    """Fail for good."""
    note("refuse")
    raise ValueError(reason)


@app.task(name="moving.parent")
def parent(x: int) -> None:
    """Call another task."""
    note(f"parent {x}")
    add.delay(x, x)


def everything() -> None:
    """Make a call of each kind that can lie in a queue on the day of the deployment."""
    add.apply_async((1, 2), task_id="plain")
    add.apply_async((3, 4), task_id="later", countdown=2)
    add.apply_async((5, 6), task_id="late", expires=datetime.now(timezone.utc) - timedelta(1))
    add.apply_async((7, 8), task_id="linked", link=add.s(10).set(task_id="link"))
    (add.s(20, 1).set(task_id="first") | add.s(2).set(task_id="second")).apply_async()
    insist.apply_async((3,), task_id="insist")
    refuse.apply_async(("no",), task_id="refuse")
    if app.conf.result_backend:
        chord(add.s(number, number) for number in (30, 40))(total.s().set(task_id="total"))


def one_of_each() -> None:
    """Call a task that needs its arguments, and one that needs none."""
    add.apply_async((1, 2), task_id="add")
    clean.apply_async(task_id="clean")


def parents(count: str) -> None:
    """Call a task that calls another one, several times."""
    for number in range(int(count)):
        parent.delay(number)


def failure(name: str) -> None:
    """Call a task that fails for good."""
    refuse.apply_async(("no",), task_id=f"refuse-{name}")


def appointment() -> None:
    """Call a task for a day that is far away."""
    add.apply_async((9, 9), task_id="appointment", countdown=86_400)


if __name__ == "__main__":
    # Under its own name: that is where the tasks' functions are.
    from tests.acceptance import moving

    getattr(moving, sys.argv[1])(*sys.argv[2:])
