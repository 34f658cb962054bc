"""An app that watches itself: with or without the outbox, it notes Celery's signals in a file.

A worker and a dispatcher are started with ``-A``; :func:`call` makes the calls. Configured by the
environment alone.
"""

from __future__ import annotations

import json
import os
from datetime import date, datetime, timedelta, timezone
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from billiard.process import current_process
from celery import Celery, Task, signals
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import Ignore, Reject

from celery_outbox import PermanentError
from tests.wait import wait_for_file

FOLDER = Path(os.environ["OBSERVED_FOLDER"])
STOCK = "OBSERVED_STOCK" in os.environ

#: What nobody but the body may see.
SECRET = "s3cret-argument"
RESULT = "s3cret-result"

#: What kombu's JSON has a way to write.
TYPED = [
    UUID(int=7),
    Decimal("1.10"),
    date(2026, 1, 31),
    clock(1, 2, 3),
    datetime(2026, 1, 31, 12, 30),
    datetime(2026, 1, 31, 12, 30, 15, 250000, tzinfo=timezone(timedelta(hours=1))),
    b"text",
    b"\xff\x00",
    "a\x00b",
    2**70,
    float("inf"),
    {"nested": [Decimal("0.1"), None, True]},
]


class FilesBackend(KeyValueStoreBackend):
    """Results in files of one folder; one of them cannot be stored the first time."""

    def get(self, key: Any) -> Any:
        """Return what is stored, or ``None``."""
        file = FOLDER / self._name(key)
        return file.read_bytes() if file.exists() else None

    def mget(self, keys: Any) -> Any:
        """Return several."""
        return [self.get(key) for key in keys]

    def set(self, key: Any, value: Any) -> None:
        """Store a value."""
        broken = FOLDER / "broken-once"
        if self._name(key).endswith("broken-1") and not broken.exists():
            broken.touch()
            raise OSError("the result backend is away")
        (FOLDER / self._name(key)).write_bytes(
            value if isinstance(value, bytes) else value.encode()
        )

    def delete(self, key: Any) -> None:
        """Forget a value."""
        (FOLDER / self._name(key)).unlink(missing_ok=True)

    def _name(self, key: Any) -> str:
        return key.decode() if isinstance(key, bytes) else str(key)


app = Celery(
    "shop",
    broker=os.environ["OBSERVED_BROKER"],
    backend=f"{__name__}:FilesBackend",
    task_cls=Task if STOCK else "celery_outbox:OutboxTask",
)
app.conf.update(
    worker_send_task_events=True,
    broker_connection_retry_on_startup=True,
    result_backend_always_retry=False,
    outbox_poll_interval=0.1,
    outbox_publish_timeout=5.0,
    outbox_database_url=os.environ.get("OBSERVED_DATABASE"),
)


@app.task(name="shop.mourn")
def mourn(request: Any, error: Any, traceback: Any) -> None:
    """Note an error: a callback that Celery calls where it meets the error."""
    note("errback", request.id, error=repr(error), args=request.args)


calling = False


def note(signal: str, task_id: Any, **more: Any) -> None:
    """Leave a line; one write, so that processes do not mix theirs."""
    # In two processes nobody's order is the right one.
    where = "call" if calling else current_process().name.rstrip("-0123456789")
    line = json.dumps({"signal": signal, "id": task_id, "where": where, **more}, default=repr)
    with (FOLDER / "signals").open("a") as file:
        file.write(line + "\n")


def _id_of(arguments: dict[str, Any]) -> Any:
    """The id of the task that a signal is about, wherever it has it."""
    for name in ("task_id", "id"):
        if arguments.get(name):
            return arguments[name]
    for name in ("headers", "request"):
        found = arguments.get(name)
        if found is not None:
            return found["id"] if isinstance(found, dict) else found.id
    request = getattr(arguments.get("sender"), "request", None)
    return None if request is None else request.id


def _watch(name: str) -> None:
    def receive(**arguments: Any) -> None:
        note(name, _id_of(arguments), **_details(name, arguments))

    getattr(signals, name).connect(receive, weak=False)


def _details(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a receiver is given, as far as it does not depend on the run."""
    if name == "task_prerun":
        return {"args": list(arguments["args"]), "kwargs": arguments["kwargs"]}
    if name == "task_postrun":
        return {"state": arguments["state"], "retval": repr(arguments["retval"])}
    if name == "task_success":
        return {"result": arguments["result"]}
    if name == "task_failure":
        return {"error": repr(arguments["exception"]), "args": list(arguments["args"])}
    if name == "task_revoked":
        return {"terminated": arguments["terminated"], "expired": arguments["expired"]}
    if name in ("before_task_publish", "after_task_publish"):
        return {"routing_key": arguments["routing_key"], "body": list(arguments["body"][0])}
    if name == "task_received":
        return {"task": arguments["request"].name}
    return {}


SIGNALS = (
    "before_task_publish",
    "after_task_publish",
    "task_received",
    "task_prerun",
    "task_postrun",
    "task_success",
    "task_failure",
    "task_retry",
    "task_revoked",
    "task_rejected",
    "task_unknown",
    "task_internal_error",
)
for _name in SIGNALS:
    _watch(_name)


@app.task(bind=True, name="shop.add")
def add(self: Any, x: Any, secret: str = "") -> Any:
    """Return a result."""
    return x


@app.task(bind=True, name="shop.refuse")
def refuse(self: Any, secret: str) -> None:
    """Fail for good."""
    raise PermanentError("refused")


@app.task(bind=True, name="shop.insist")
def insist(self: Any, secret: str, countdown: float = 0.05) -> int:
    """Ask for a retry, then succeed."""
    if self.request.retries == 0:
        raise self.retry(countdown=countdown)
    return int(self.request.retries)


@app.task(bind=True, name="shop.linger")
def linger(self: Any, secret: str) -> None:
    """Run until it is stopped."""
    (FOLDER / "lingering").touch()
    wait_for_file(FOLDER / "never", 60.0)


@app.task(bind=True, name="shop.ignore")
def ignore(self: Any, secret: str) -> None:
    """Have no result."""
    raise Ignore


@app.task(bind=True, name="shop.reject")
def reject(self: Any, secret: str) -> None:
    """Refuse the message."""
    raise Reject("no", requeue=False)


def call() -> None:
    """Make all the calls."""
    global calling
    calling = True
    arguments = (SECRET,)
    add.apply_async((RESULT, SECRET), task_id="good-1")
    insist.apply_async(arguments, task_id="retried-1")
    refuse.apply_async(arguments, task_id="failed-1")
    ignore.apply_async(arguments, task_id="ignored-1")
    reject.apply_async(arguments, task_id="rejected-1", link_error=mourn.s())
    add.apply_async((6, SECRET), task_id="broken-1")
    insist.apply_async((SECRET, 600), task_id="waiting-1")
    linger.apply_async(arguments, task_id="stopped-1")
    add.apply_async((8, SECRET), task_id="behind-1")
    add.apply_async(([*TYPED, SECRET],), task_id="typed-1")
    add.apply_async((7, SECRET), task_id="revoked-1", countdown=2)
