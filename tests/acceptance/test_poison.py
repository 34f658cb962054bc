"""Messages that no worker can run: each is kept, none stops the worker or its neighbours."""

from __future__ import annotations

from typing import Any

from celery_outbox.store import job as jobs
from celery_outbox.store.job import Job
from tests.acceptance.poison import KINDS, Poison, send, send_unreadable
from tests.acceptance.system import System
from tests.wait import eventually

POOLS = {
    "postgresql-rabbitmq": "prefork",
    "postgresql-redis": "threads",
    "sqlite-filesystem": "solo",
}


def row(system: System, job_id: str) -> Job:
    """Return the whole row of a job."""
    found = system.outbox.database.read(
        lambda connection: jobs.get(connection, system.outbox.tables, job_id)
    )
    assert found is not None, job_id
    return found


def quarantined(system: System) -> dict[str, Any]:
    """Return what is in quarantine in the database, by id."""
    return {entry.id: entry for entry in system.outbox.control.quarantined(limit=1000)}


def test_poison_of_every_kind_is_kept_and_the_next_job_runs(system: System) -> None:
    send(system.shop.app, "celery", *KINDS)
    unreadable = send_unreadable(system.shop.app, "celery")
    everything = len(KINDS) + unreadable
    system.shop.add.apply_async((1, 2), task_id="good")
    system.dispatcher()
    worker = system.worker("-c", "2", pool=POOLS[system.name])

    system.reaches("good", "succeeded", deadline=60.0)
    eventually(lambda: len(quarantined(system)) == everything, deadline=60.0)
    found = quarantined(system)
    for kind in KINDS:
        check(system, found, kind)
    stands_for_another = [
        entry for entry in found.values() if entry.error_code == "malformed:properties"
    ]
    assert len(stands_for_another) == unreadable
    eventually(lambda: system.depth("outbox.quarantine") == everything, deadline=60.0)
    assert worker.alive
    assert worker.log().count(" ready.") == 1
    # Nothing is left with the worker either: what it holds would come back.
    worker.terminate()
    assert system.depth("celery") == 0
    assert system.depth("outbox.quarantine") == everything


def check(system: System, found: dict[str, Any], kind: Poison) -> None:
    """Look at what is kept of one message."""
    if kind.has_id:
        job = row(system, kind.name)
    else:
        [job] = [
            each
            for each in (row(system, job_id) for job_id in found if job_id.startswith("invalid-"))
            if each.body == (kind.kept or kind.body) and same_headers(each, kind)
        ]
    entry = found[job.id]
    assert (job.task, job.queue, job.state) == (kind.task, "celery", "quarantined"), kind.name
    assert (entry.reason, entry.source) == (kind.reason, "broker"), kind.name
    assert kind.error is None or entry.error_code == kind.error, kind.name
    assert (job.attempt, job.deliveries) == (0, 1), kind.name
    assert system.runs(job.id) == 0
    envelope = job.envelope
    assert job.body == (kind.kept or kind.body), kind.name
    assert (envelope.content_type, envelope.content_encoding) == (kind.content_type, kind.encoding)
    assert system.events(job.id)[0] == "quarantined"


def same_headers(job: Job, kind: Poison) -> bool:
    """Whether a job was made of the message of this kind."""
    headers = job.envelope.headers
    return {name: headers.get(name) for name in ("id", "task")} == {
        name: kind.all_headers.get(name) for name in ("id", "task")
    }
