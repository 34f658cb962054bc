"""Runs the observed app once, with or without the outbox, and notes what it shows to others."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from celery import Celery
from celery.events.state import State

from tests.factories import open_database
from tests.processes import Processes
from tests.servers.ports import free_port
from tests.wait import eventually

APP = "tests.acceptance.observed"

#: The signals of each call after which nothing follows.
LAST = {
    "good-1": ("task_postrun", 1),
    "retried-1": ("task_postrun", 2),
    "failed-1": ("task_postrun", 1),
    "ignored-1": ("task_postrun", 1),
    "rejected-1": ("task_postrun", 1),
    "broken-1": ("task_internal_error", 1),
    "stopped-1": ("task_revoked", 1),
    "behind-1": ("task_postrun", 1),
    "typed-1": ("task_postrun", 1),
    "waiting-1": ("task_postrun", 1),
    "revoked-1": ("task_revoked", 1),
    "unknown-1": ("task_unknown", 1),
    None: ("task_rejected", 1),
}


@dataclass
class Observation:
    """What the app has shown."""

    folder: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    #: What Celery's own monitor makes of the events.
    state: State = field(default_factory=State)
    #: Whether the monitors have shown a task that runs, and one that waits for it in the worker.
    showed_busy: bool = False
    #: The address of Flower, which has seen the same events.
    flower: str = ""

    def signals(self) -> dict[tuple[Any, str], list[dict[str, Any]]]:
        """The signals by the id of their task and the process, in their order there."""
        file = self.folder / "signals"
        found: dict[tuple[Any, str], list[dict[str, Any]]] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            noted = json.loads(line)
            found.setdefault((noted.pop("id"), noted.pop("where")), []).append(noted)
        return found

    def names(self) -> dict[tuple[Any, str], list[str]]:
        """Their names."""
        return {each: [one["signal"] for one in noted] for each, noted in self.signals().items()}

    def event_types(self) -> dict[str, list[str]]:
        """The types of the events by the id of their task, in their order."""
        found: dict[str, list[str]] = {}
        for event in self.events:
            if event["type"].startswith("task-"):
                found.setdefault(event["uuid"], []).append(event["type"])
        return found

    def states(self) -> list[dict[str, Any]]:
        """The states by task id: in Celery's own monitor, and in Flower, if there is one."""
        found = [{task.uuid: task.state for _, task in self.state.tasks_by_time()}]
        if self.flower:
            tasks = json.loads(get(f"{self.flower}/api/tasks"))
            found.append({task_id: task["state"] for task_id, task in tasks.items()})
        return found

    def shows(self, expected: dict[str, str]) -> bool:
        """Whether every monitor shows these states."""
        return all(expected.items() <= each.items() for each in self.states())

    def is_over(self) -> bool:
        """Whether every call has had its last signal."""
        counts: Counter[tuple[Any, str]] = Counter()
        for (task_id, _), names in self.names().items():
            counts.update((task_id, name) for name in names)
        last = dict(LAST)
        if not self.flower:
            # Without the outbox a retry waits in the worker.
            last["waiting-1"] = ("task_received", 2)
        return all(counts[(task_id, signal)] >= times for task_id, (signal, times) in last.items())


@contextmanager
def observing(
    processes: Processes, folder: Path, broker: str, *, stock: bool
) -> Iterator[Observation]:
    """Run everything once; yields what was seen, before the worker ends."""
    environment = {"OBSERVED_FOLDER": str(folder), "OBSERVED_BROKER": broker}
    observation = Observation(folder)
    if stock:
        environment["OBSERVED_STOCK"] = "1"
    else:
        environment["OBSERVED_DATABASE"] = f"sqlite:///{folder}/outbox.sqlite"
        with open_database(environment["OBSERVED_DATABASE"]):
            pass
    monitor = Celery("monitor", broker=broker, set_as_current=False)
    with _listening(monitor, observation):
        # One process, so that one call follows the other.
        options = ["-c", "1", "-E", "--without-mingle", "--without-gossip", "-l", "INFO"]
        processes.celery(APP, "worker", *options, env=environment, name="worker")
        if not stock:
            observation.flower = start_flower(processes, environment)
        eventually(lambda: monitor.control.ping(timeout=1.0), deadline=60.0)
        if not stock:
            processes.celery(APP, "outbox", "dispatch", env=environment, name="dispatcher")
        monitor.control.revoke("revoked-1")
        assert (
            processes.python(
                "-c", f"from {APP} import call; call()", env=environment, name="caller"
            ).wait(60.0)
            == 0
        )
        monitor.send_task("shop.unknown", task_id="unknown-1")
        with monitor.connection_for_write() as connection:
            producer = monitor.amqp.Producer(connection)
            producer.publish({"no": "task"}, exchange="", routing_key="celery")
        eventually((folder / "lingering").exists, deadline=60.0)
        busy = {"stopped-1": "STARTED", "behind-1": "RECEIVED"}
        observation.showed_busy = eventually(lambda: observation.shows(busy), deadline=60.0)
        monitor.control.revoke("stopped-1", terminate=True, signal="SIGKILL")
        eventually(observation.is_over, deadline=60.0, message=lambda: str(observation.names()))
        yield observation
    monitor.close()


def start_flower(processes: Processes, environment: dict[str, str]) -> str:
    """Start a Flower that watches the app; returns its address when it answers."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    processes.celery(
        APP,
        "flower",
        "--address=127.0.0.1",
        f"--port={port}",
        env={**environment, "FLOWER_UNAUTHENTICATED_API": "true"},
        name="flower",
    )
    eventually(lambda: get(f"{address}/healthcheck"), deadline=60.0)
    return address


def get(url: str) -> str:
    """Fetch a page."""
    with urlopen(url, timeout=10.0) as answer:
        return str(answer.read().decode())


@contextmanager
def _listening(app: Celery, observation: Observation) -> Iterator[None]:
    """Receive the worker's events, as monitors do."""
    stop, ready = threading.Event(), threading.Event()

    def listen() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": note})
            with receiver.consumer_context() as (connection, _channel, _consumers):
                ready.set()
                while not stop.is_set():
                    try:
                        connection.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def note(event: dict[str, Any]) -> None:
        observation.events.append(dict(event))
        observation.state.event(event)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        assert ready.wait(30.0), "no events can be received"
        yield
    finally:
        stop.set()
        thread.join(30.0)
