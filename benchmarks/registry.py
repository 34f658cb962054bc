"""All sections, in the order in which a job lives."""

from __future__ import annotations

from benchmarks.sections import record_many, record_one, record_thousand
from benchmarks.sections.callers import Run

SECTIONS: dict[str, tuple[Run, str]] = {
    "record-one": (record_one.run, "one job per transaction"),
    "record-1000": (record_thousand.run, "1,000 .delay() in one transaction"),
    "record-many": (record_many.run, "10,000 jobs in bulk"),
}
