"""The app; the tasks are in a module that it includes."""

from __future__ import annotations

from celery import Celery

from tests.acceptance.shapes.settings import BROKER, DATABASE, RESULTS

app = Celery(
    "proj",
    broker=BROKER,
    backend=RESULTS,
    include=["tests.acceptance.shapes.proj.tasks"],
    task_cls="celery_outbox:OutboxTask",
)

app.conf.update(result_expires=3600, outbox_database_url=DATABASE)

if __name__ == "__main__":
    app.start()
