"""Stock Celery in an app that uses the database, as one that needs an outbox does."""

from __future__ import annotations

import os
from functools import cache

from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from benchmarks.programs.traces import note_run

app = Celery("bench", broker=os.environ["BENCH_BROKER"], set_as_current=False)
app.conf.task_acks_late = True
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@cache
def _engine() -> Engine:
    # Made in the child that uses it.
    return create_engine(os.environ["BENCH_DATABASE"])


@app.task(name="bench.noop")
def noop(number: int, period: str) -> None:
    """Ask the database something, and be counted."""
    with Session(_engine()) as session:
        session.execute(text("SELECT 1"))
    note_run()
