"""Dispatchers die in the middle of a drain: every message goes out, and each job runs once."""

from __future__ import annotations

import json
import signal

import pytest
from sqlalchemy import func, select, update

from celery_outbox.store.clock import db_after
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually

pytestmark = pytest.mark.once

JOBS, BATCH = 400, 50

#: Where a dispatcher dies in the middle of a batch: half of it is sent, one by one.
MIDDLE = BATCH // 2


@on_rabbitmq
def test_dispatchers_killed_in_a_drain_cost_a_message_per_row_in_flight_and_no_run(
    system: System,
) -> None:
    with system.outbox.engine.begin() as connection, system.outbox.use(connection):
        for number in range(JOBS):
            system.shop.add.apply_async((number, 1), task_id=f"add-{number}")
    settings = {
        **json.loads(system.environment["SHOP_SETTINGS"]),
        "outbox_dispatch_batch": BATCH,
        # The dead hold what they had claimed until the test lets it go.
        "outbox_dispatch_lease": 600.0,
    }
    options = {"SHOP_SETTINGS": json.dumps(settings)}
    one_by_one = {"SHOP_SETTINGS": json.dumps({**settings, "outbox_dispatch_window": 1})}

    # Two between confirm and mark, each with a batch of its own.
    dying = [system.dispatcher(fault="dispatch.before_mark", **options) for _ in range(2)]
    assert [each.wait(60) for each in dying] == [-signal.SIGKILL] * 2
    assert system.depth("celery") == 2 * BATCH
    assert len(_unpublished(system)) == JOBS
    # A third in the middle of its second batch; the first one is marked.
    in_the_middle = f"add-{3 * BATCH + MIDDLE}"
    third = system.dispatcher(
        fault="dispatch.mid_batch", OUTBOX_FAULT_JOB=in_the_middle, **one_by_one
    )
    assert third.wait(60) == -signal.SIGKILL
    assert len(_unpublished(system)) == JOBS - BATCH
    eventually(lambda: system.depth("celery") == 3 * BATCH + MIDDLE)

    _end_leases(system)
    once = system.dispatcher("--once", **options)
    assert once.wait(60) == 0, once.log()
    assert _unpublished(system) == set()
    copies = system.depth("celery") - JOBS
    assert copies == 2 * BATCH + MIDDLE

    system.worker()
    eventually(lambda: sum(_deliveries(system).values()) == JOBS + copies, deadline=120)
    eventually(lambda: system.depth("celery") == 0)
    assert max(_deliveries(system).values()) == 2
    assert _results(system) == {f"add-{number}": number + 1 for number in range(JOBS)}
    assert all(system.runs(f"add-{number}") == 1 for number in (0, MIDDLE, JOBS - 1))
    assert len((system.folder / "runs").read_text().split("\n")[:-1]) == JOBS


def _unpublished(system: System) -> set[str]:
    message = system.outbox.tables.message
    with system.outbox.engine.connect() as connection:
        statement = select(message.c.job_id).where(message.c.published_at.is_(None))
        return set(connection.scalars(statement))


def _end_leases(system: System) -> None:
    """Let go what dead dispatchers hold."""
    message = system.outbox.tables.message
    held = message.c.published_at.is_(None) & message.c.claimed_by.is_not(None)
    with system.outbox.engine.begin() as connection:
        assert connection.scalar(select(func.count()).where(held)) == 3 * BATCH
        connection.execute(update(message).where(held).values(due_at=db_after(-1)))


def _deliveries(system: System) -> dict[str, int]:
    job = system.outbox.tables.job
    with system.outbox.engine.connect() as connection:
        return {row[0]: row[1] for row in connection.execute(select(job.c.id, job.c.deliveries))}


def _results(system: System) -> dict[str, int]:
    job = system.outbox.tables.job
    ended = select(job.c.id, job.c.result).where(job.c.state == "succeeded", job.c.attempt == 1)
    with system.outbox.engine.connect() as connection:
        return {row.id: json.loads(row.result) for row in connection.execute(ended)}
