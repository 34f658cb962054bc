"""Failures that will not pass end in quarantine: in the database and in the broker, once."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually


def _published_and_copied(system: System, job_id: str) -> bool:
    return system.depth("outbox.quarantine") == 1 and system.depth("celery") == 0


def test_a_permanent_error_leaves_exactly_one_entry(system: System) -> None:
    system.shop.refuse.apply_async(("no such period",), task_id="export-42")
    system.dispatcher()
    system.worker()

    job = system.reaches("export-42", "quarantined")
    assert (job.reason, job.attempt, job.lease) == ("permanent", 1, None)
    eventually(lambda: _published_and_copied(system, "export-42"))
    # A job that runs after it proves that the worker went on.
    system.shop.add.apply_async((1, 2), task_id="add-1")
    system.reaches("add-1", "succeeded")
    assert system.depth("outbox.quarantine") == 1
    message = system.take("outbox.quarantine")
    assert message.headers["id"] == "export-42"
    assert b"no such period" not in str(message.body).encode()


def test_a_worker_killed_between_settle_and_reject_leaves_exactly_one_entry(
    system: System,
) -> None:
    system.shop.refuse.apply_async(("no such period",), task_id="export-42")
    system.dispatcher()

    killed = system.worker(fault="execute.after_settle")
    assert killed.wait() == -9
    assert system.job("export-42").state == "quarantined"
    system.redeliver()
    system.worker()

    eventually(lambda: system.job("export-42").deliveries == 2)
    eventually(lambda: _published_and_copied(system, "export-42"))
    assert system.runs("export-42") == 1


@on_rabbitmq
def test_rabbitmq_dead_letters_the_message_itself(system: System) -> None:
    system.shop.refuse.apply_async(("no",), task_id="export-42")
    system.dispatcher()
    system.worker()

    system.reaches("export-42", "quarantined")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    message = system.take("outbox.quarantine")
    assert message.headers["x-first-death-reason"] == "rejected"
    assert "copied" not in system.events("export-42")


@on_rabbitmq
def test_a_queue_without_dead_lettering_gets_the_copy_through_the_outbox(system: System) -> None:
    system.shop.app.amqp.queues.add("plain")
    system.shop.refuse.apply_async(("no",), task_id="export-42", queue="plain")
    system.dispatcher()
    system.worker("-Q", "plain")

    system.reaches("export-42", "quarantined")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    headers = system.take("outbox.quarantine").headers
    assert headers["x-outbox-job-id"] == "export-42"
    assert headers["x-outbox-reason"] == "permanent"
    assert headers["x-outbox-attempt"] == 1
    assert "copied" in system.events("export-42")


def test_a_replayed_job_runs_with_all_its_attempts_before_it(system: System) -> None:
    system.shop.fail.apply_async(("away",), task_id="export-42")
    system.dispatcher()
    system.worker()
    system.reaches("export-42", "quarantined")

    system.outbox.control.replay("export-42")

    eventually(lambda: system.runs("export-42") == 6)
    job = system.reaches("export-42", "quarantined")
    assert job.attempt == 3
    assert "replayed" in system.events("export-42")


def test_a_discarded_job_is_cancelled_and_its_journal_says_why_it_was_there(
    system: System,
) -> None:
    system.shop.refuse.apply_async(("no",), task_id="export-42")
    system.dispatcher()
    system.worker()
    system.reaches("export-42", "quarantined")

    system.outbox.control.discard("export-42")

    assert system.job("export-42").state == "cancelled"
    reasons = {event.reason for event in system.outbox.control.journal("export-42")}
    assert "permanent" in reasons
    assert system.command("quarantine", "list") == []


def test_a_message_whose_job_is_unknown_is_quarantined_and_not_run(system: System) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")
    system.dispatcher("--once").wait()
    assert system.depth("celery") == 1
    _forget(system, "export-42")

    system.dispatcher()
    system.worker()

    job = system.reaches("export-42", "quarantined")
    assert (job.reason, system.runs("export-42")) == ("unknown_job", 0)
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    entry = system.command("quarantine", "show", "export-42")
    assert (entry["source"], entry["reason"]) == ("broker", "unknown_job")


def test_a_task_that_no_worker_knows_is_quarantined_and_replayed_after_the_deploy(
    system: System,
) -> None:
    system.shop.add.apply_async((1, 2), task_id="add-1")
    system.dispatcher()
    worker = system.worker("-I", "tests.acceptance.without_add")

    job = system.reaches("add-1", "quarantined")
    assert (job.reason, job.attempt) == ("unknown_task", 0)
    eventually(lambda: _published_and_copied(system, "add-1"))
    worker.terminate()
    system.outbox.control.replay("add-1")
    system.worker()

    assert system.reaches("add-1", "succeeded").attempt == 1


@pytest.mark.parametrize("text", ["hidden\x00secret", "hidden secret"])
def test_the_text_of_an_error_is_nowhere(system: System, text: str) -> None:
    system.shop.refuse.apply_async((text,), task_id="export-42")
    system.dispatcher()
    system.worker()

    system.reaches("export-42", "quarantined")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    message = system.take("outbox.quarantine")
    seen = [
        str(message.headers),
        str(message.body),
        str(system.outbox.control.journal("export-42")),
        str(system.job("export-42")),
        str(system.command("quarantine", "show", "export-42")),
    ]
    assert not any("hidden" in each for each in seen)


def _forget(system: System, job_id: str) -> None:
    tables = system.outbox.tables
    with system.outbox.engine.begin() as connection:
        connection.execute(tables.message.delete().where(tables.message.c.job_id == job_id))
        connection.execute(tables.event.delete().where(tables.event.c.job_id == job_id))
        connection.execute(tables.job.delete().where(tables.job.c.id == job_id))
