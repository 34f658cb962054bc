"""All sections, in the order in which a job lives."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.contest import Say
from benchmarks.results import Section
from benchmarks.sections import (
    dispatch,
    execute,
    growth,
    latency,
    memory,
    notify,
    record_many,
    record_one,
    record_thousand,
)
from benchmarks.stage import Stage

#: Measures a section: where, its size (quick, default or full), how many rounds, and who is told.
Run = Callable[[Stage, str, int, Say], Section]

SECTIONS: dict[str, tuple[Run, str]] = {
    "record-one": (record_one.run, "one job per transaction"),
    "record-1000": (record_thousand.run, "1,000 .delay() in one transaction"),
    "record-many": (record_many.run, "10,000 jobs in bulk"),
    "notify": (notify.run, "what waking the dispatcher costs those who commit"),
    "dispatch": (dispatch.run, "a backlog of 20,000 rows to RabbitMQ"),
    "dispatch-redis": (dispatch.run_redis, "a backlog to Redis"),
    "dispatch-plot": (dispatch.run_plot, "rate against backlog, for --plot"),
    "execute": (execute.run, "tasks that do nothing"),
    "latency": (latency.run, "from the commit to the first line of the body"),
    "growth": (growth.run, "the same with many more rows"),
    "memory": (memory.run, "a dispatcher over many messages, and workers"),
}
