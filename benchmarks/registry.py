"""All sections, in the order in which a job lives."""

from __future__ import annotations

from benchmarks.sections import dispatch, execute, latency, record_many, record_one, record_thousand
from benchmarks.sections.callers import Run

SECTIONS: dict[str, tuple[Run, str]] = {
    "record-one": (record_one.run, "one job per transaction"),
    "record-1000": (record_thousand.run, "1,000 .delay() in one transaction"),
    "record-many": (record_many.run, "10,000 jobs in bulk"),
    "dispatch": (dispatch.run, "a backlog of 20,000 rows to RabbitMQ"),
    "dispatch-redis": (dispatch.run_redis, "a backlog to Redis"),
    "dispatch-plot": (dispatch.run_plot, "rate against backlog, for --plot"),
    "execute": (execute.run, "tasks that do nothing"),
    "latency": (latency.run, "from the commit to the first line of the body"),
}
