"""Calls by name between services: one side has the outbox, the other is a stock Celery worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import chain, signature
from sqlalchemy.orm import Session

from celery_outbox import UnknownJob
from tests.acceptance.system import System
from tests.processes import Processes, ProcessGroup
from tests.wait import eventually

both_brokers = pytest.mark.parametrize(
    "system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True
)


def start_billing(system: System, processes: Processes) -> ProcessGroup:
    """Start a stock Celery worker of another app."""
    options = ["-P", "solo", "-Q", "billing", "--without-gossip", "--without-mingle"]
    return processes.python(
        "-m", "tests.acceptance.billing", "worker", *options, env=system.environment, name="billing"
    )


def invoices(folder: Path) -> list[str]:
    """Return what the other service has written down, in the order of the ids."""
    file = folder / "invoices"
    return sorted(file.read_text().splitlines()) if file.exists() else []


@both_brokers
def test_calls_by_name_reach_stock_workers_in_full_and_our_own_as_jobs(
    system: System, processes: Processes
) -> None:
    app, add = system.shop.app, system.shop.add
    # This process plays one that has not imported all that the workers have.
    app.tasks.unregister("shop.refuse")
    foreign = signature("billing.invoice", app=app, queue="billing")
    with Session(system.outbox.engine) as session, system.outbox.use(session):
        app.send_task("billing.invoice", (1,), queue="billing", task_id="rolled-back")
        session.rollback()
        app.send_task(
            "billing.invoice", (42,), {"currency": "CHF"}, queue="billing", task_id="invoice-1"
        )
        session.commit()
    foreign.clone((7,)).set(task_id="invoice-2").delay()
    steps = [
        add.s(1, 2).set(task_id="sum"),
        foreign.clone().set(task_id="invoice-3"),
        # By the exchange: a stock client would declare a queue, and without our dead letters.
        add.s(10).set(task_id="after", exchange="celery", routing_key="celery"),
    ]
    chain(*steps).apply_async()
    app.send_task("shop.add", (20, 22), task_id="by-name")
    app.send_task("shop.refuse", ("secret",), task_id="ours-after-all")
    app.send_task("shop.typo", (1,), task_id="typo")

    billing = start_billing(system, processes)
    system.dispatcher()
    system.worker()

    for job_id in ("invoice-1", "invoice-2", "invoice-3"):
        job = system.reaches(job_id, "relayed")
        assert (job.task, job.queue, job.attempt) == ("billing.invoice", "billing", 0)
        assert set(system.events(job_id)) == {"recorded", "published", "relayed"}
    eventually(lambda: len(invoices(system.folder)) == 3, message=billing.tail)
    assert invoices(system.folder) == [
        "invoice-1 42 CHF (...)",
        "invoice-2 7 EUR (...)",
        "invoice-3 3 EUR (...)",
    ]
    for job_id in ("sum", "after", "by-name"):
        assert system.reaches(job_id, "succeeded").attempt == 1
        assert system.runs(job_id) == 1
    assert system.events("after")[0] == "adopted"
    refused = system.reaches("ours-after-all", "quarantined")
    assert (refused.reason, refused.attempt) == ("permanent", 1)
    assert system.runs("ours-after-all") == 1
    assert system.reaches("typo", "quarantined").reason == "unknown_task"
    with pytest.raises(UnknownJob):
        system.job("rolled-back")
    assert system.command("status", "invoice-1")["state"] == "relayed"
    eventually(lambda: system.depth("celery") == system.depth("billing") == 0)


@pytest.mark.parametrize("system", ["postgresql-rabbitmq"], indirect=True)
def test_a_relayed_message_that_no_queue_or_broker_takes_ends_in_quarantine(
    system: System,
) -> None:
    app = system.shop.app
    nowhere = {"exchange": "amq.direct", "routing_key": "nowhere"}
    app.send_task("billing.invoice", (1,), task_id="unroutable", **nowhere)
    app.send_task("billing.invoice", (2,), task_id="taken", queue="billing")
    app.send_task("billing.invoice", (3,), task_id="expired", queue="billing", expires=0.001)
    assert system.dispatcher("--once").wait() == 0
    assert system.job("unroutable").reason == "unroutable"
    assert system.job("taken").state == "relayed"
    assert system.job("expired").state == "expired"
    assert system.depth("billing") == 1
    message = system.take("billing")
    assert message.headers["id"] == "taken"
    assert message.payload[0] == [2]
