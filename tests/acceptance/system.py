"""A running system: a database, a broker, and the processes of one test between them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType
from typing import Any

from kombu.exceptions import OperationalError

from celery_outbox import JobStatus
from example_project.configuration import FILESYSTEM_TRANSPORT
from tests.processes import Processes, ProcessGroup
from tests.wait import eventually

APP = "tests.acceptance.app"

#: Short, so that tests do not wait; the proportions are those of the defaults.
SETTINGS: dict[str, Any] = {
    "outbox_lease": 2.0,
    "outbox_heartbeat_interval": 0.5,
    "outbox_publish_timeout": 1.0,
    "outbox_dispatch_lease": 2.0,
    "outbox_poll_interval": 0.1,
    "outbox_maintenance_interval": 0.2,
    "outbox_retry_delay": 0.05,
    "outbox_backoff_max": 0.5,
    "broker_connection_retry_on_startup": True,
}


class System:
    """Starts processes of the app and looks at what they leave behind.

    :param name: what it is made of, for the tests' ids.
    :param folder: where results, traces and the filesystem broker's messages are.
    """

    def __init__(
        self,
        name: str,
        processes: Processes,
        folder: Path,
        database: str,
        broker: str,
        transport_options: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self._processes = processes
        self._transport_options = transport_options or {}
        everything = {
            **SETTINGS,
            "broker_transport": FILESYSTEM_TRANSPORT if broker.startswith("filesystem") else None,
            "broker_transport_options": self._transport_options,
            **(settings or {}),
        }
        self.environment = {
            "SHOP_DATABASE": database,
            "SHOP_BROKER": broker,
            "SHOP_FOLDER": str(folder),
            "SHOP_SETTINGS": json.dumps(everything),
        }
        self.shop = self._load()
        self.outbox = self.shop.outbox
        self.outbox.init()

    def _load(self) -> ModuleType:
        """The app in this process, which plays the web process."""
        os.environ.update(self.environment)
        module = sys.modules.get(APP)
        return import_module(APP) if module is None else reload(module)

    def close(self) -> None:
        """Let go of database and broker."""
        self.outbox.engine.dispose()
        self.shop.app.close()
        for name in self.environment:
            os.environ.pop(name, None)

    # -- processes ---------------------------------------------------------------------

    def dispatcher(self, *arguments: str, fault: str | None = None, **more: str) -> ProcessGroup:
        """Start a dispatcher; ``fault`` names the boundary at which it is killed."""
        environment = self._with_fault(fault, more)
        return self._processes.celery(
            APP, "outbox", "dispatch", *arguments, env=environment, name="dispatcher"
        )

    def worker(
        self, *arguments: str, pool: str = "solo", fault: str | None = None, **more: str
    ) -> ProcessGroup:
        """Start a worker; in the solo pool a fault kills the whole worker."""
        environment = self._with_fault(fault, more)
        options = ["-P", pool, "--without-gossip", "--without-mingle", "-l", "INFO"]
        return self._processes.celery(
            APP, "worker", *options, *arguments, env=environment, name="worker"
        )

    def command(self, *arguments: str) -> Any:
        """Run ``celery outbox ARGUMENTS --json`` to its end; returns what it printed."""
        return self._processes.answer(APP, *arguments, env=self.environment)

    def _with_fault(self, fault: str | None, more: dict[str, str]) -> dict[str, str]:
        environment = {**self.environment, **more}
        if fault is not None:
            environment["OUTBOX_FAULT"] = fault
        return environment

    # -- what they leave behind --------------------------------------------------------

    def job(self, job_id: str) -> JobStatus:
        """The job's status."""
        return self.outbox.job(job_id)

    def reaches(self, job_id: str, state: str, deadline: float = 30.0) -> JobStatus:
        """Wait until the job is in a state."""
        eventually(
            lambda: self.job(job_id).state == state,
            deadline=deadline,
            message=lambda: f"{job_id} did not become {state}: {self.job(job_id)}",
        )
        return self.job(job_id)

    def events(self, job_id: str) -> list[str]:
        """The names of the job's journal lines."""
        return [event.event for event in self.outbox.control.journal(job_id)]

    def runs(self, job_id: str) -> int:
        """How often the body of a job ran."""
        file = self.folder / "runs"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(line.partition(" ")[0] for line in lines)[job_id]

    def depth(self, queue: str) -> int:
        """Messages that are ready in a queue of the broker."""
        with self.shop.app.connection_for_read() as connection, connection.channel() as channel:
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except (OperationalError, *connection.channel_errors):
                return 0

    def overdue(self) -> list[str]:
        """The jobs whose message a worker on Redis has held past the visibility timeout."""
        with self.shop.app.connection_for_read() as connection, connection.channel() as channel:
            latest = time.time() - self._transport_options["visibility_timeout"]
            tags = channel.client.zrangebyscore(channel.unacked_index_key, 0, latest)
            held = channel.client.hmget(channel.unacked_key, tags) if tags else []
            return [json.loads(each)[0]["headers"]["id"] for each in held if each is not None]

    def take(self, queue: str) -> Any:
        """Take a message out of a queue, or ``None``."""
        with self.shop.app.connection_for_read() as connection, connection.channel() as channel:
            message = channel.basic_get(queue, no_ack=True)
            if message is None:
                return None
            return channel.message_to_python(message)

    def redeliver(self) -> None:
        """See to it that the broker delivers what a dead worker had, to the next worker.

        RabbitMQ does it by itself. A worker on Redis does it when it starts, for messages whose
        visibility timeout is over: wait for that. kombu's filesystem transport does not know
        such a thing; it moves a message away when it is read, so this moves it back.
        """
        if self.name.endswith("redis"):
            eventually(self.overdue)
            return
        processed = self._transport_options.get("processed_folder")
        if processed is None:
            return
        for file in Path(processed).glob("*.celery.msg"):
            shutil.move(file, Path(self._transport_options["data_folder_in"]) / file.name)
