"""The same tasks with celery-outbox."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks.programs.traces import note_run, note_start
from celery_outbox import Outbox

app = Celery(
    "bench",
    broker=os.environ["BENCH_BROKER"],
    set_as_current=False,
    task_cls="celery_outbox:OutboxTask",
)
app.conf.outbox_database_url = os.environ["BENCH_DATABASE"]
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True
outbox = Outbox(app)


@app.task(name="bench.noop")
def noop(number: int, period: str) -> None:
    """Do nothing, and be counted."""
    note_run()


@app.task(name="bench.stamp")
def stamp(number: int, period: str) -> None:
    """Say when it began."""
    note_start(number)
