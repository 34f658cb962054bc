"""One heartbeat keeps everything that a worker holds, and nothing else."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from sqlalchemy import event

from celery_outbox import Outbox
from celery_outbox.core.states import State
from celery_outbox.execute import steps
from celery_outbox.execute.steps import Heartbeat
from celery_outbox.store import transitions, workers
from tests.factories import Database


def _claimed(database: Database, worker: str, count: int) -> list[str]:
    ids = []
    for _ in range(count):
        job = database.put(State.QUEUED)
        database.do(transitions.claim, database.job(job.id), actor=worker, lease=5)
        ids.append(job.id)
    return ids


def test_a_beat_is_two_statements_however_many_jobs_run(database: Database):
    mine, others = _claimed(database, "one", 50), _claimed(database, "two", 1)
    database.do(workers.register, "one", hostname="host", pid=1)
    before = {job_id: database.job(job_id).leased_until for job_id in mine + others}
    statements: list[str] = []
    event.listen(
        database.engine,
        "before_cursor_execute",
        lambda connection, cursor, statement, *rest: statements.append(statement),
    )
    assert database.do(workers.beat, "one", mine + others, lease=60) == 50
    updates = [statement for statement in statements if statement.startswith("UPDATE")]
    assert len(updates) == 2
    assert all(database.job(job_id).leased_until > before[job_id] for job_id in mine)
    assert database.job(others[0]).leased_until == before[others[0]]


def test_a_restart_under_the_same_name_keeps_nothing_of_the_first(database: Database):
    held = _claimed(database, "host:1:aaaa", 2)
    for worker in ("host:1:aaaa", "host:1:bbbb"):
        database.do(workers.register, worker, hostname="host", pid=1)
    assert database.do(workers.beat, "host:1:bbbb", held, lease=60) == 0
    assert database.do(workers.beat, "host:1:aaaa", held, lease=60) == 2


def test_no_pool_process_is_forked_in_the_middle_of_a_beat(outbox: Outbox, monkeypatch):
    gate, inside = threading.Lock(), []
    monkeypatch.setattr(steps, "_forks", gate)
    write = outbox.database.write
    monkeypatch.setattr(
        outbox.database,
        "write",
        lambda work, **options: (inside.append(gate.locked()), write(work, **options))[1],
    )
    heartbeat = Heartbeat(SimpleNamespace(app=outbox.app))
    heartbeat._stop.set()
    heartbeat._run()
    # Its entry and its beat; it signs off when the pool is gone.
    assert inside == [True, True, False]
