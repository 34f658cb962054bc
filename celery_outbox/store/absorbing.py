"""What becomes of a call whose job id is taken."""

from __future__ import annotations

from sqlalchemy import Connection

from celery_outbox.exceptions import JobIdTaken
from celery_outbox.store import chords, continuing
from celery_outbox.store import job as jobs
from celery_outbox.store.recording import NewJob
from celery_outbox.store.schema import Tables


def absorb(connection: Connection, tables: Tables, new: NewJob, *, actor: str) -> None:
    """Let a call find the job that has its id: the first one of its task, or the replaced job
    that goes on with this call.

    Raises:
        JobIdTaken: it is a job of another task.
    """
    first = jobs.first(connection, tables, new.id)
    if first is None:
        return
    if continuing.goes_on_as(first, new):
        continuing.go_on(connection, tables, first, new, actor=actor)
    elif first.task != new.task and not continuing.was_replaced(first):
        raise JobIdTaken(job_id=new.id, task=new.task, owner=first.task)
    elif new.chord_id is not None and new.chord_position is not None:
        # The chord gets what the first job ends with.
        chords.expect(connection, tables, new.chord_id, new.id, new.chord_position)
