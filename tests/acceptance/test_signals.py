"""What an app shows to others: with the outbox, signals and events are as they are without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.acceptance.observing import Observation, get, observing
from tests.processes import Processes
from tests.servers.rabbitmq import Rabbitmq
from tests.wait import eventually
from tests.watchdog import Watchdog

SECRETS = ("s3cret-argument", "s3cret-result")

#: What monitors show in the end.
FINAL = {
    "good-1": "SUCCESS",
    "retried-1": "SUCCESS",
    "failed-1": "FAILURE",
    "waiting-1": "RETRY",
    "stopped-1": "REVOKED",
    "revoked-1": "REVOKED",
    "behind-1": "SUCCESS",
    "broken-1": "SUCCESS",
}


@pytest.fixture(scope="module")
def seen(
    rabbitmq_server: Rabbitmq,
    watchdog: Watchdog,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Observation, Observation]]:
    """What the app shows without the outbox, and with it; the second still runs."""
    with ExitStack() as stack:
        observations = []
        for stock in (True, False):
            name = f"outbox_test_{os.getpid()}_observed_{stock}"
            folder = tmp_path_factory.mktemp("observed")
            processes = Processes(folder, watchdog)
            broker = rabbitmq_server.create_vhost(name)
            stack.callback(rabbitmq_server.delete_vhost, name)
            stack.callback(processes.close)
            run = observing(processes, folder, broker, stock=stock)
            observations.append(stack.enter_context(run))
            if stock:
                processes.close()
        yield observations[0], observations[1]


#: The names of the processes of a worker.
MAIN, CHILD = "MainProcess", "ForkPoolWorker"


def test_signals_come_in_their_usual_order(seen: tuple[Observation, Observation]) -> None:
    without, with_outbox = (each.names() for each in seen)
    # A result that could not be stored is reported again; Celery gives it up.
    without["broken-1", MAIN].append("task_received")
    without["broken-1", CHILD] += ["task_prerun", "task_success", "task_postrun"]
    # A retry waits in the database; Celery's waits in a worker.
    assert without["waiting-1", MAIN].pop() == "task_received"
    assert with_outbox == without


def test_signals_have_what_they_usually_have(seen: tuple[Observation, Observation]) -> None:
    without, with_outbox = (each.signals() for each in seen)
    for key in without:
        if key[0] not in ("broken-1", "waiting-1"):
            assert with_outbox[key] == without[key]


def test_arguments_keep_their_types(seen: tuple[Observation, Observation]) -> None:
    prerun = [each.signals()["typed-1", CHILD][0]["args"][0] for each in seen]
    assert prerun[0] == prerun[1]
    assert {"UUID('00000000-0000-0000-0000-000000000007')", "Decimal('1.10')"} < {
        each for each in prerun[1] if isinstance(each, str)
    }


def test_events_come_in_their_usual_order(seen: tuple[Observation, Observation]) -> None:
    without, with_outbox = (each.event_types() for each in seen)
    for types in with_outbox.values():
        # That failed messages are rejected, for the quarantine queue, is an event, too.
        while "task-rejected" in types:
            types.remove("task-rejected")
    for task_id in ("good-1", "retried-1", "failed-1", "ignored-1", "stopped-1", "revoked-1"):
        assert with_outbox[task_id] == without[task_id]


def test_monitors_show_every_state(seen: tuple[Observation, Observation]) -> None:
    _, with_outbox = seen
    assert with_outbox.showed_busy
    assert len(with_outbox.states()) == 2, "Celery's own, and Flower"
    eventually(lambda: with_outbox.shows(FINAL), message=lambda: str(with_outbox.states()))


def test_monitors_show_neither_arguments_nor_results(
    seen: tuple[Observation, Observation],
) -> None:
    without, with_outbox = seen
    assert all(secret in str(without.events) for secret in SECRETS)
    pages = [get(f"{with_outbox.flower}/task/{task_id}") for task_id in FINAL]
    pages += [get(f"{with_outbox.flower}/api/task/info/{task_id}") for task_id in FINAL]
    pages += [get(f"{with_outbox.flower}/api/tasks"), get(f"{with_outbox.flower}/tasks")]
    logs = [file.read_text() for file in with_outbox.folder.glob("*.log")]
    assert len(logs) >= 4
    for text in (*pages, *logs, str(with_outbox.events)):
        assert not [secret for secret in SECRETS if secret in text]
