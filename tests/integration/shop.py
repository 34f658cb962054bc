"""An app with the tasks of a chord, whose messages are delivered by hand."""

from __future__ import annotations

from typing import Any

from celery_outbox import Outbox, PermanentError
from celery_outbox.operate.members import Members
from tests.factories import Database
from tests.integration.delivering import add_task, deliver, raising


class Shop:
    """An app with the tasks of a chord, whose messages are delivered by hand."""

    def __init__(self, outbox: Outbox, recorded: Database) -> None:
        self.outbox = outbox
        self.recorded = recorded
        outbox.app.conf.result_backend = "cache+memory://"
        self.calls: list[Any] = []
        self.part = add_task(outbox.app, lambda value: value, name="shop.part")
        self.refuse = add_task(outbox.app, raising(PermanentError("no")), name="shop.refuse")
        self.body = add_task(outbox.app, lambda values: self._call(values), name="shop.body")
        self.errback = add_task(outbox.app, lambda job_id: job_id, name="shop.errback")
        self.members = Members(outbox.app, outbox.chords, after=0)

    def _call(self, values: Any) -> Any:
        self.calls.append(values)
        return values

    def run(self, *tasks: Any) -> None:
        """Deliver, in any order, what waits of these tasks (all by default)."""
        for task in tasks or (self.part, self.refuse, self.body, self.errback):
            for job_id in self.waiting(task.name):
                deliver(task, job_id)

    def waiting(self, task: str) -> list[str]:
        """Return the ids of jobs of a task that no worker has taken, latest first."""
        job = self.recorded.tables.job
        statement = job.select().where(job.c.task == task, job.c.state == "queued")
        with self.recorded.engine.connect() as connection:
            return [row.id for row in connection.execute(statement.order_by(job.c.id.desc()))]

    def chords(self) -> list[tuple[str, int | None, int]]:
        """Return state, size and count of each chord."""
        chord = self.recorded.tables.chord
        with self.recorded.engine.connect() as connection:
            rows = connection.execute(chord.select().order_by(chord.c.recorded_at))
            return [(row.state, row.size, row.counted) for row in rows]

    def parts(self) -> int:
        """Return how many members are kept."""
        with self.recorded.engine.connect() as connection:
            return len(connection.execute(self.recorded.tables.chord_part.select()).all())

    def reaches(self, job_id: str) -> Any:
        """Return what the result backend has of a job: its state and its result."""
        meta = self.outbox.app.backend.get_task_meta(job_id)
        return meta["status"], str(meta["result"])
