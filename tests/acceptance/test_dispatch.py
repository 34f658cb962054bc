"""Dispatchers as processes: side by side, stopped, woken, and without their broker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kombu import Queue

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import APP, System
from tests.processes import REPOSITORY, Processes
from tests.proxy import Proxy
from tests.wait import eventually


@on_rabbitmq
def test_four_dispatchers_publish_each_row_once(system: System) -> None:
    with system.outbox.engine.begin() as connection, system.outbox.use(connection):
        for number in range(1000):
            system.shop.add.delay(number, 1)

    dispatchers = [system.dispatcher("--once") for _ in range(4)]
    for dispatcher in dispatchers:
        assert dispatcher.wait(60) == 0, dispatcher.log()

    assert system.depth("celery") == 1000
    assert _unpublished(system) == 0


@on_rabbitmq
def test_maintenance_is_taken_over_from_a_dispatcher_that_was_killed(system: System) -> None:
    both = [system.dispatcher(), system.dispatcher()]
    lock = system.outbox.tables.lock

    def holder() -> int:
        """The process id of the one that does it."""
        with system.outbox.engine.connect() as connection:
            name = connection.scalar(lock.select().with_only_columns(lock.c.held_by))
        return int(name.split(":")[2]) if name else 0

    eventually(lambda: holder() in {dispatcher.pid for dispatcher in both})
    first = next(dispatcher for dispatcher in both if dispatcher.pid == holder())
    system.shop.add.apply_async((1, 2), task_id="add-1")
    assert system.worker(fault="execute.after_claim").wait() == -9
    first.kill()

    eventually(lambda: "rescued" in system.events("add-1"))
    rescued = next(
        event for event in system.outbox.control.journal("add-1") if event.event == "rescued"
    )
    other = next(dispatcher for dispatcher in both if dispatcher is not first)
    assert f":{other.pid}:" in str(rescued.actor)
    system.worker()
    assert system.reaches("add-1", "succeeded").attempt == 2
    # In good order it is given up at once.
    other.terminate()
    assert holder() == 0


def test_sigterm_ends_a_dispatcher_in_good_order(system: System) -> None:
    dispatcher = system.dispatcher()
    system.shop.add.apply_async((1, 2), task_id="add-1")
    eventually(lambda: system.depth("celery") == 1)

    assert dispatcher.terminate(10) == 0
    assert "outbox.dispatcher_stopped" in dispatcher.log()


def test_once_drains_and_exits(system: System) -> None:
    for number in range(7):
        system.shop.add.delay(number, 1)

    once = system.dispatcher("--once")

    assert once.wait() == 0
    assert "published 7, refused 0" in once.log()
    assert system.depth("celery") == 7


def test_a_broken_row_does_not_stop_the_ones_behind_it(system: System) -> None:
    system.shop.add.apply_async((0, 1), task_id="broken")
    for number in range(10):
        system.shop.add.apply_async((number, 1), task_id=f"good-{number}")
    tables = system.outbox.tables
    with system.outbox.engine.begin() as connection:
        connection.execute(
            tables.job.update().where(tables.job.c.id == "broken").values(envelope="{oops")
        )

    system.dispatcher("--once").wait()

    assert system.depth("celery") == 10
    job = system.job("broken")
    assert (job.state, job.reason) == ("quarantined", "unpublishable")


@on_rabbitmq
def test_an_unroutable_job_is_quarantined_and_not_marked_published(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="lost", exchange="amq.direct", routing_key="nobody")
    system.shop.add.apply_async((1, 2), task_id="found")

    system.dispatcher()

    job = system.reaches("lost", "quarantined")
    assert (job.reason, job.published_at) == ("unroutable", None)
    eventually(lambda: system.job("found").published_at is not None)
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    entry = system.command("quarantine", "show", "lost")
    assert entry["source"] == "broker"


@on_rabbitmq
def test_a_full_queue_parks_nothing_and_is_published_when_there_is_room(system: System) -> None:
    full = Queue(
        "full", queue_arguments={"x-max-length": 1, "x-overflow": "reject-publish"}, durable=True
    )
    system.shop.add.apply_async((1, 2), task_id="first", queue=full)
    system.shop.add.apply_async((1, 2), task_id="second", queue=full)
    system.dispatcher("--once").wait()
    assert system.job("second").state == "queued"
    assert system.job("second").published_at is None
    assert system.take("full") is not None

    system.dispatcher()

    eventually(lambda: system.job("second").published_at is not None)


def test_a_broker_that_is_away_burns_nothing(
    processes: Processes,
    tmp_path: Path,
    postgresql_url: str,
    rabbitmq_url: str,
    proxy_to: Callable[[str], Proxy],
) -> None:
    proxy = proxy_to(rabbitmq_url)
    folder = tmp_path / "shop"
    folder.mkdir()
    system = System("outage", processes, folder, postgresql_url, proxy.url_for(rabbitmq_url))
    proxy.cut()
    for number in range(50):
        system.shop.add.apply_async((number, 1), task_id=f"add-{number}")

    dispatcher = system.dispatcher()
    eventually(lambda: dispatcher.log().count("outbox.dispatch_paused") >= 8)
    assert all(system.job(f"add-{number}").state == "queued" for number in range(50))
    proxy.resume()

    eventually(lambda: _unpublished(system) == 0)
    assert system.depth("celery") == 50
    system.worker()
    for number in range(50):
        assert system.reaches(f"add-{number}", "succeeded").attempt == 1
    system.close()


@on_rabbitmq
def test_once_says_when_the_broker_is_away(system: System) -> None:
    system.shop.add.apply_async((1, 2), task_id="add-1")

    once = system.dispatcher("--once", SHOP_BROKER="amqp://guest:guest@127.0.0.1:1//")

    assert once.wait() == 1
    assert "stays in the database" in once.log()
    assert "Traceback" not in once.log()


@on_rabbitmq
def test_a_commit_wakes_an_idle_dispatcher(system: System) -> None:
    settings = system.environment["SHOP_SETTINGS"]
    slow = settings.replace('"outbox_poll_interval": 0.1', '"outbox_poll_interval": 600.0')
    slow = slow.replace('"outbox_maintenance_interval": 0.2', '"outbox_maintenance_interval": 600')
    dispatcher = system.dispatcher(SHOP_SETTINGS=slow)
    eventually(lambda: "outbox.dispatcher_started" in dispatcher.log())
    # It has looked once, and would look again in ten minutes.
    system.shop.add.apply_async((1, 2), task_id="first")
    eventually(lambda: system.depth("celery") == 1)

    system.shop.add.apply_async((1, 2), task_id="second")

    eventually(lambda: system.depth("celery") == 2)


def test_the_beat_tasks_dispatch_and_maintain(system: System) -> None:
    schedule = system.outbox.beat_schedule()
    system.shop.add.apply_async((1, 2), task_id="add-1")
    worker = system.worker()
    # The entries expire when nobody takes them before they are due again.
    eventually(lambda: " ready." in worker.log())
    app = system.shop.app

    for entry in schedule.values():
        # What beat does with an entry.
        app.tasks[entry["task"]].apply_async(**entry["options"])

    system.reaches("add-1", "succeeded")


def test_beat_runs_the_schedule(system: System, processes: Processes) -> None:
    system.shop.add.apply_async((1, 2), task_id="add-1")
    system.worker()

    processes.celery(
        "tests.acceptance.with_beat",
        "beat",
        "-s",
        str(system.folder / "beat"),
        env=system.environment,
    )

    system.reaches("add-1", "succeeded")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["status", "no-such-job"], "There is no job 'no-such-job'"),
        (["journal", "no-such-job"], "There is no job 'no-such-job'"),
        (["cancel", "no-such-job"], "There is no job 'no-such-job'"),
        (["quarantine", "show", "no-such-job"], "There is no job 'no-such-job'"),
        (["quarantine", "replay", "no-such-job"], "There is no job 'no-such-job'"),
        (["quarantine", "discard", "no-such-job"], "There is no job 'no-such-job'"),
    ],
)
@pytest.mark.parametrize("system", ["sqlite-filesystem"], indirect=True)
def test_an_unknown_job_is_an_error(system: System, arguments: list[str], complaint: str) -> None:
    code, output = _run(system, *arguments)

    assert code == 1
    assert complaint in output
    assert "Traceback" not in output


@pytest.mark.parametrize("system", ["sqlite-filesystem"], indirect=True)
def test_status_answers_the_five_questions(system: System) -> None:
    system.shop.export.apply_async((3,), task_id="export-42")
    system.dispatcher()
    system.worker()
    system.reaches("export-42", "succeeded")

    code, output = _run(system, "status", "export-42")

    assert code == 0
    for question in ("recorded", "published", "deliveries", "result", "why stopped"):
        assert question in output
    data = system.command("status", "export-42")
    assert list(data) == [
        "id", "task", "queue", "state", "attempt", "max_attempts", "deliveries",
        "recorded_at", "available_at", "published_at", "started_at", "finished_at",
        "result_key", "error_code", "reason", "lease",
    ]  # fmt: skip
    assert data["result_key"] == "reports/export-42.csv"
    assert data["recorded_at"].endswith("+00:00")


@pytest.mark.parametrize("system", ["sqlite-filesystem"], indirect=True)
def test_missing_tables_are_one_line_and_exit_code_1(system: System, tmp_path: Path) -> None:
    system.environment["SHOP_DATABASE"] = f"sqlite:///{tmp_path / 'empty.sqlite'}"

    for arguments in (["status", "x"], ["list"], ["dispatch", "--once"], ["maintain"]):
        code, output = _run(system, *arguments)
        assert code == 1
        assert "celery -A yourapp outbox init" in output
        assert "Traceback" not in output
    assert _run(system, "init")[0] == 0
    assert _run(system, "init")[0] == 0
    assert _run(system, "list")[0] == 0


def _unpublished(system: System) -> int:
    message = system.outbox.tables.message
    with system.outbox.engine.connect() as connection:
        return len(
            connection.execute(message.select().where(message.c.published_at.is_(None))).all()
        )


def _run(system: System, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "outbox", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **system.environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr
