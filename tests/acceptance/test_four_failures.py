"""The four failures of the product's founding text, each with a real process killed."""

from __future__ import annotations

from tests.acceptance.system import System
from tests.wait import eventually


def test_a_job_goes_from_the_transaction_to_its_result(system: System) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")
    assert system.depth("celery") == 0

    system.dispatcher()
    system.worker()

    job = system.reaches("export-42", "succeeded")
    assert (job.attempt, job.deliveries) == (1, 1)
    # A worker may be faster than the dispatcher's mark.
    eventually(lambda: system.job("export-42").published_at is not None)
    assert (system.folder / "results/reports/export-42.csv").read_text() == "0\n1\n2\n"
    assert system.events("export-42")[:1] == ["recorded"]
    assert sorted(system.events("export-42")[1:]) == ["claimed", "published", "succeeded"]
    eventually(lambda: system.depth("celery") == 0)


def test_a_dispatcher_killed_before_the_publish_loses_nothing(system: System) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")

    killed = system.dispatcher(fault="dispatch.before_publish")
    assert killed.wait() == -9
    assert system.depth("celery") == 0
    assert system.job("export-42").published_at is None

    system.dispatcher()
    system.worker()

    job = system.reaches("export-42", "succeeded")
    assert (job.attempt, job.deliveries, system.runs("export-42")) == (1, 1, 1)


def test_a_dispatcher_killed_between_publish_and_mark_publishes_again_and_it_runs_once(
    system: System,
) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")

    killed = system.dispatcher(fault="dispatch.before_mark")
    assert killed.wait() == -9
    assert system.depth("celery") == 1
    assert system.job("export-42").published_at is None
    system.dispatcher()
    eventually(lambda: system.depth("celery") == 2)
    system.worker()

    eventually(lambda: system.job("export-42").deliveries == 2)
    job = system.reaches("export-42", "succeeded")
    assert (job.attempt, system.runs("export-42")) == (1, 1)
    assert system.events("export-42").count("duplicate") == 1
    eventually(lambda: system.depth("celery") == 0)


def test_a_worker_killed_after_the_result_and_before_the_ack_runs_nothing_again(
    system: System,
) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")
    system.dispatcher()

    killed = system.worker(fault="execute.after_settle")
    assert killed.wait() == -9
    assert system.job("export-42").state == "succeeded"
    before = (system.folder / "results/reports/export-42.csv").stat()
    system.redeliver()
    system.worker()

    eventually(lambda: system.job("export-42").deliveries == 2)
    after = (system.folder / "results/reports/export-42.csv").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert (system.job("export-42").attempt, system.runs("export-42")) == (1, 1)
    assert "duplicate" in system.events("export-42")
    eventually(lambda: system.depth("celery") == 0)


def test_a_worker_killed_between_the_file_and_the_settle_finds_the_file(system: System) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")
    system.dispatcher()

    killed = system.worker(fault="execute.before_settle")
    assert killed.wait() == -9
    assert system.job("export-42").state == "running"
    before = (system.folder / "results/reports/export-42.csv").stat()
    system.worker()

    job = system.reaches("export-42", "succeeded")
    after = (system.folder / "results/reports/export-42.csv").stat()
    assert after.st_ino == before.st_ino
    # The second attempt adopted the file: the body did not run again.
    assert (job.attempt, system.runs("export-42")) == (2, 1)
    assert "rescued" in system.events("export-42")


def test_a_third_failed_attempt_ends_in_quarantine_and_the_next_job_runs(system: System) -> None:
    system.shop.fail.apply_async(("the dependency is away",), task_id="export-42")
    system.shop.add.apply_async((1, 2), task_id="add-1")
    system.dispatcher()
    system.worker()

    job = system.reaches("export-42", "quarantined")
    assert (job.attempt, job.reason, job.error_code) == (3, "attempts_exhausted", "ConnectionError")
    assert system.runs("export-42") == 3
    system.reaches("add-1", "succeeded")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    eventually(lambda: system.depth("celery") == 0)
    entry = system.command("quarantine", "list")[0]
    assert (entry["id"], entry["source"], entry["attempt"]) == ("export-42", "settle", 3)
