"""Stock Celery: late acks, no results."""

from __future__ import annotations

import os

from celery import Celery

from benchmarks.programs.traces import note_run, note_start

app = Celery("bench", broker=os.environ["BENCH_BROKER"], set_as_current=False)
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@app.task(name="bench.noop")
def noop(number: int, period: str) -> None:
    """Do nothing, and be counted."""
    note_run()


@app.task(name="bench.stamp")
def stamp(number: int, period: str) -> None:
    """Say when it began."""
    note_start(number)
