"""One row of the matrix on one broker: tables and queues of its own, and the processes on them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kombu import Connection
from sqlalchemy import ColumnElement, func, select

from celery_outbox.core.states import FINAL_STATES
from celery_outbox.store import job as jobs
from celery_outbox.store import journal, messages
from celery_outbox.store.clock import db_after, db_now
from celery_outbox.store.job import Job
from celery_outbox.store.journal import Event
from tests.acceptance.crash.shop import BARE, QUEUE, bookings, build
from tests.faults import ForkedProcess, ForkServer, fault
from tests.wait import eventually as eventually_often

#: Looks less often than other tests do, because so many rows look at the same time.
eventually = partial(eventually_often, deadline=120.0, interval=0.15)

SHOP = "tests.acceptance.crash.shop"

#: The job whose processes die, and others that are published beside it.
JOB, NEIGHBOURS = "export-42", ("export-41", "export-43")

#: Seconds. Every wait that a crash makes necessary is one of these: short, but longer than a
#: loaded machine stops a process that is at work.
SETTINGS: dict[str, Any] = {
    "outbox_lease": 3.0,
    "outbox_heartbeat_interval": 0.5,
    "outbox_publish_timeout": 5.0,
    "outbox_dispatch_lease": 10.0,
    "outbox_poll_interval": 0.5,
    "outbox_maintenance_interval": 0.5,
    "outbox_retry_delay": 0.05,
    "outbox_backoff_max": 0.5,
    "broker_connection_retry_on_startup": True,
    "worker_enable_remote_control": False,
}

#: The keys of kombu's Redis transport that all workers of a logical database share.
_UNACKED = ("unacked_key", "unacked_index_key", "unacked_mutex_key")

#: Seconds after which Redis delivers again what a dead worker had.
VISIBILITY_TIMEOUT = 2

#: Workers that may follow one another until no message is left: one that ends leaves what it has
#: got and not begun.
ROUNDS = 5


@dataclass(frozen=True)
class Broker:
    """One kind of broker.

    :param url: where it is; all rows share it.
    :param queue_type: what RabbitMQ calls the kind of queue.
    """

    name: str
    url: str
    queue_type: str = ""

    @property
    def is_redis(self) -> bool:
        """Whether unacknowledged messages are the transport's affair."""
        return self.name == "redis"


@dataclass
class Bench:
    """Tables, queues and processes of one row.

    :param row: names the row; no other row of the same database and broker has this name.
    :param folder: for results, traces and logs.
    """

    row: str
    broker: Broker
    database: str
    folder: Path
    servers: ForkServer
    settings: dict[str, Any] = field(default_factory=dict)
    started: list[ForkedProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = self.row.replace("-", "_") + "_"
        everything = {**SETTINGS, "outbox_table_prefix": prefix, **self.settings}
        everything["outbox_quarantine_queue"] = prefix + "quarantine"
        if self.broker.is_redis:
            everything["broker_transport_options"] = {
                "visibility_timeout": VISIBILITY_TIMEOUT,
                **{name: prefix + name for name in _UNACKED},
            }
        self.folder.mkdir()
        self.environment = {
            "SHOP_DATABASE": self.database,
            "SHOP_BROKER": self.broker.url,
            "SHOP_FOLDER": str(self.folder),
            "SHOP_SETTINGS": json.dumps(everything),
            "SHOP_QUEUE_TYPE": self.broker.queue_type,
            "SHOP_PREFIX": prefix,
        }
        self.queues = [prefix + name for name in (QUEUE, BARE)]
        self.quarantine = prefix + "quarantine"
        self.shop = build(self.environment)
        self.outbox = self.shop.outbox
        self.tables = self.outbox.tables
        self.outbox.init()
        self._bookings = bookings(prefix)
        self._bookings.create(self.outbox.engine)
        # Used by one thread, as the rest of this object.
        self._connection: Connection = self.shop.app.connection_for_read()

    def close(self) -> None:
        """Kill what runs, and let go of database and broker."""
        for process in reversed(self.started):
            process.kill()
        self._connection.release()
        self.outbox.engine.dispose()
        self.shop.app.close()

    # -- processes ---------------------------------------------------------------------

    def start(self, name: str, *arguments: str, **environment: str) -> ForkedProcess:
        """Start a function of the shop in a process of its own."""
        process = self.servers.start(
            f"{SHOP}:{name}",
            *arguments,
            env={**self.environment, **environment},
            log=self.folder / f"{len(self.started)}-{'-'.join(arguments[:2])}.log",
        )
        self.started.append(process)
        return process

    def worker(self, pool: str = "solo", **environment: str) -> ForkedProcess:
        """Start a worker with one process for the bodies."""
        options = ["-P", pool, "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle"]
        return self.start("celery", "worker", *options, **environment)

    def dispatcher(self, **environment: str) -> ForkedProcess:
        """Start a dispatcher, which does the maintenance too."""
        return self.start("celery", "outbox", "dispatch", **environment)

    def dies(self, process: ForkedProcess) -> None:
        """Wait until a process has died by SIGKILL, with all it had, and the broker knows."""
        code = process.wait(120)
        assert code == -9, f"exit code {code}"
        self._gone(process)

    def ends(self, process: ForkedProcess) -> None:
        """End a worker in good order, and wait until the broker knows."""
        # Before that, SIGTERM ends it at once.
        eventually(lambda: " ready." in process.log())
        code = process.terminate()
        assert code == 0, f"exit code {code}"
        self._gone(process)

    def _gone(self, process: ForkedProcess) -> None:
        process.kill()
        eventually(lambda: all(self._count(queue)[1] == 0 for queue in self.queues))

    # -- steps -------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish what is due, from here."""
        done = self.outbox.dispatcher().drain()
        assert done.outage is None, done.outage

    def lose_messages(self) -> None:
        """Take what is in the broker out of it, as a broker that loses messages does."""
        with self._connection.channel() as channel:
            assert channel.basic_get(self.queues[0], no_ack=True) is not None

    def until(self, condition: ColumnElement[bool]) -> None:
        """Wait until a condition on the job's row is true, by the database's clock."""
        column = self.tables.job.c
        statement = select(column.id).where(column.id == JOB, condition)
        eventually(lambda: self._read(statement) is not None)

    def lease_ends(self) -> None:
        """Wait until the lease of the job's attempt is over."""
        self.until(self.tables.job.c.leased_until < db_now())

    def has_expired(self) -> None:
        """Wait until the job's time is over."""
        self.until(self.tables.job.c.expires_at < db_now())

    def message_is_overdue(self) -> None:
        """Wait until the job's message counts as lost."""
        after = self.outbox.config.republish_after
        self.until(messages.published_at(self.tables) < db_after(-after))

    def booked(self) -> list[str]:
        """The jobs whose row is committed, once for each row."""
        with self.outbox.engine.connect() as connection:
            return list(connection.scalars(select(self._bookings.c.job)))

    def recovers(self, *job_ids: str) -> None:
        """Let a dispatcher and a worker do the rest, until there is nothing left to do."""
        self.dispatcher()
        self._redelivers()
        for _ in range(ROUNDS):
            worker = self.worker()
            eventually(
                lambda: self._is_quiet(job_ids),
                message=lambda: f"not over: {[self.job(each) for each in job_ids]}",
            )
            # What is on its way from the broker to the worker is only seen when that is gone.
            self.ends(worker)
            if self.in_broker() == 0:
                return

    def _is_quiet(self, job_ids: Sequence[str]) -> bool:
        found = [self.job(job_id) for job_id in job_ids]
        ended = all(job is not None and job.state in FINAL_STATES for job in found)
        return ended and self.unpublished() == 0 and self.in_broker() == 0

    # -- what is there -----------------------------------------------------------------

    def job(self, job_id: str = JOB) -> Job | None:
        """The row of a job."""
        return self.outbox.database.read(lambda c: jobs.get(c, self.tables, job_id))

    def journal(self, job_id: str = JOB) -> list[Event]:
        """The journal of a job."""
        return self.outbox.database.read(lambda c: journal.read(c, self.tables, job_id))

    def unpublished(self) -> int:
        """Outbox rows that are still to be published."""
        message = self.tables.message
        statement = select(func.count()).where(message.c.published_at.is_(None))
        return int(self._read(statement))

    def in_broker(self) -> int:
        """Messages of the jobs in the broker. Delivered and unacknowledged ones count on Redis;
        on RabbitMQ they do when their worker is gone."""
        return sum(self._count(queue)[0] for queue in self.queues)

    def in_quarantine(self) -> int:
        """Messages in the quarantine queue of the broker."""
        return self._count(self.quarantine)[0]

    def runs(self, job_id: str = JOB) -> int:
        """How often the body of a job was entered."""
        file = self.folder / "runs"
        return file.read_text().split().count(job_id) if file.exists() else 0

    def effects(self) -> list[str]:
        """The effects on the other side."""
        folder = self.folder / "effects"
        return sorted(each.name for each in folder.iterdir()) if folder.exists() else []

    def results(self) -> list[str]:
        """The jobs that have a complete result in the result store."""
        folder = self.folder / "results" / "reports"
        files = sorted(folder.iterdir()) if folder.exists() else []
        return [file.stem for file in files if file.read_text() == "done\n"]

    def _redelivers(self) -> None:
        """Wait until a worker that starts now is given what a dead one had.

        RabbitMQ sees to that by itself. A worker on Redis looks, when it starts, for messages
        whose visibility timeout is over.
        """
        if self.broker.is_redis:
            with self._connection.channel() as channel:
                eventually(lambda: _overdue(channel) == channel.client.hlen(channel.unacked_key))

    def _count(self, queue: str) -> tuple[int, int]:
        """Messages and consumers of a queue."""
        with self._connection.channel() as channel:
            if self.broker.is_redis:
                unacked = channel.client.hvals(channel.unacked_key)
                mine = sum(json.loads(each)[2] == queue for each in unacked)
                return int(channel.client.llen(queue)) + mine, 0
            try:
                found = channel.queue_declare(queue, passive=True)
            except self._connection.channel_errors:
                return 0, 0
            return int(found.message_count), int(found.consumer_count)

    def _read(self, statement: Any) -> Any:
        return self.outbox.database.read(lambda connection: connection.scalar(statement))


def _overdue(channel: Any) -> int:
    latest = time.time() - VISIBILITY_TIMEOUT
    return int(channel.client.zcount(channel.unacked_index_key, 0, latest))


def armed(*boundaries: str, once: Path | None = None) -> dict[str, str]:
    """The environment of a process that is to die at a boundary with the job."""
    return fault(*boundaries, job_id=JOB, once=once)
