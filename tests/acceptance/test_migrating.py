"""The swap, and the way back, while messages lie in the queues: docs/migrating.rst."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_outbox import JobStatus, Outbox, UnknownJob
from celery_outbox.core.states import FINAL_STATES
from celery_outbox.queues import consumes_quorum_queues
from tests.acceptance.system import SETTINGS
from tests.processes import REPOSITORY, Processes, ProcessGroup
from tests.servers.rabbitmq import Rabbitmq, RabbitmqApi
from tests.wait import eventually

APP = "tests.acceptance.moving"

SHOP_KIND = "quorum" if consumes_quorum_queues() else "classic"


class Site:
    """A site whose processes are deployed one by one.

    :param settings: of the new side.
    """

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        database: str,
        broker: str,
        results: str | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.vhost = broker.rpartition("/")[2]
        self.settings = {**SETTINGS, **settings}
        self._processes = processes
        self._broker = broker
        self._environment = {
            "MOVING_FOLDER": str(folder),
            "MOVING_DATABASE": database,
            "MOVING_BROKER": broker,
            **({"MOVING_BACKEND": results} if results else {}),
        }
        app = Celery("looking", broker=broker)
        app.conf.outbox_database_url = database
        self.outbox = Outbox(app)
        self.outbox.init()

    def close(self) -> None:
        self.outbox.engine.dispose()
        self.outbox.app.close()

    def worker(self, side: str, *arguments: str, queues: str | None = None) -> ProcessGroup:
        """Start a worker and wait until it consumes."""
        options = ["-P", "solo", "--without-gossip", "--without-mingle", "-l", "INFO"]
        worker = self.start(side, "worker", *options, "-n", f"{side}@%h", *arguments, queues=queues)
        eventually(lambda: " ready." in worker.log(), message=worker.tail)
        return worker

    def dispatcher(self, *arguments: str, queues: str | None = None) -> ProcessGroup:
        return self.start("new", "outbox", "dispatch", *arguments, queues=queues)

    def start(self, side: str, *arguments: str, queues: str | None = None) -> ProcessGroup:
        name = f"{side}-{arguments[0]}"
        return self._processes.celery(
            APP, *arguments, env=self._environment_of(side, queues), name=name
        )

    def web(self, side: str, *calls: str, queues: str | None = None) -> None:
        """Let a web process of a side make some calls."""
        environment = self._environment_of(side, queues)
        process = self._processes.python("-m", APP, *calls, env=environment, name=f"{side}-web")
        assert process.wait(60) == 0, process.log()

    def command(self, *arguments: str) -> Any:
        """What a command of the new side answers in JSON."""
        return self._processes.answer(APP, *arguments, env=self._environment_of("new", None))

    def _environment_of(self, side: str, queues: str | None) -> dict[str, str]:
        more = {"MOVING_SIDE": side, "MOVING_SETTINGS": json.dumps(self.settings)}
        return self._environment | more | ({} if queues is None else {"MOVING_QUEUES": queues})

    def runs(self) -> Counter[str]:
        """Who ran what, and how often."""
        file = self.folder / "runs"
        return Counter(file.read_text().splitlines() if file.exists() else [])

    def runs_of(self, side: str, task: str) -> int:
        """How often a side ran a task."""
        return sum(count for what, count in self.runs().items() if what.split()[:2] == [side, task])

    def ran(self, task: str) -> int:
        """How often a task ran."""
        return self.runs_of("old", task) + self.runs_of("new", task)

    def jobs(self) -> list[JobStatus]:
        """All jobs."""
        return self.outbox.control.find(limit=1000)

    def open(self) -> list[str]:
        """The jobs that the new side still has to run, as its command tells."""
        return [job["id"] for job in self.command("list") if job["state"] not in FINAL_STATES]

    def depth(self, queue: str) -> int:
        with Connection(self._broker) as connection, connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).message_count)

    def job(self, job_id: str) -> JobStatus | None:
        try:
            return self.outbox.job(job_id)
        except UnknownJob:
            return None

    def reaches(self, job_id: str, state: str) -> JobStatus:
        def found() -> JobStatus | None:
            job = self.job(job_id)
            return job if job is not None and job.state == state else None

        return eventually(found, message=lambda: f"{job_id} is no {state}: {self.job(job_id)}")

    def events(self, job_id: str) -> list[str]:
        return [event.event for event in self.outbox.control.journal(job_id)]


@pytest.fixture
def site(
    processes: Processes, tmp_path: Path, postgresql_url: str, rabbitmq_url: str, redis_url: str
) -> Iterator[Site]:
    """PostgreSQL, RabbitMQ, and results on Redis."""
    site = Site(processes, tmp_path, postgresql_url, rabbitmq_url, redis_url)
    yield site
    site.close()


def policy_of_the_page() -> list[str]:
    """The arguments of ``rabbitmqctl set_policy``, as docs/migrating.rst has them."""
    page = (REPOSITORY / "docs" / "migrating.rst").read_text(encoding="utf-8")
    found = re.search(r"rabbitmqctl set_policy -p shop (.+?)\n\n", page, re.S)
    assert found is not None
    return shlex.split(found.group(1).replace("\\\n", ""))


def test_messages_of_old_callers_are_adopted_by_new_workers_and_run_to_their_end(
    site: Site,
) -> None:
    old = site.worker("old")
    site.web("old", "one_of_each")
    eventually(lambda: site.runs() == Counter({"old add 1 2": 1, "old clean": 1}))
    assert old.terminate() == 0
    site.web("old", "everything")
    assert site.depth("celery") == 9
    assert site.job("plain") is None

    site.worker("new")
    site.dispatcher()

    for job_id in ("plain", "later", "linked", "link", "first", "second", "insist", "total"):
        job = site.reaches(job_id, "succeeded")
        assert job.attempt == (4 if job_id == "insist" else 1)
    for job_id in ("plain", "later", "linked", "first", "insist"):
        assert site.events(job_id)[0] == "adopted"
    # What a new worker calls is recorded.
    assert site.events("second")[0] == "recorded"
    # RabbitMQ has dropped it itself.
    assert site.job("late") is None
    assert site.reaches("refuse", "quarantined").reason == "permanent"
    assert site.runs() - Counter({"old add 1 2": 1, "old clean": 1}) == Counter(
        f"new {what}"
        for what in (
            *("add 1 2", "add 3 4", "add 7 8", "add 15 10", "add 20 1", "add 21 2", "refuse"),
            *(f"insist {number}" for number in range(4)),
            *("add 30 30", "add 40 40", "total [60, 80]"),
        )
    )
    assert site.depth("celery") == 0


def test_with_a_queue_of_their_own_new_processes_run_beside_old_ones(
    site: Site, rabbitmq_api: RabbitmqApi
) -> None:
    old = site.worker("old")
    site.worker("new", queues="shop+")
    site.dispatcher(queues="shop+")
    site.web("new", "parents", "5", queues="shop+")
    site.web("old", "parents", "5")
    expected = Counter(
        f"{side} {what} {numbers}"
        for side in ("old", "new")
        for number in range(5)
        for what, numbers in (("parent", number), ("add", f"{number} {number}"))
    )
    eventually(lambda: site.runs() == expected, message=lambda: str(site.runs()))

    assert old.terminate() == 0
    site.web("old", "parents", "1")
    # The new workers' next configuration drains what is left.
    site.worker("new", "-n", "next@%h", queues="shop+,celery")

    eventually(lambda: site.runs()["new add 0 0"] == 2)
    jobs = site.jobs()
    assert Counter(job.queue for job in jobs) == Counter(shop=11, celery=1)
    eventually(lambda: all(job.state == "succeeded" and job.attempt == 1 for job in site.jobs()))
    assert (rabbitmq_api.kind("shop"), rabbitmq_api.kind("celery")) == (SHOP_KIND, "classic")


def test_on_the_same_queue_nothing_is_published_before_the_dispatcher_starts(site: Site) -> None:
    """Workers first, then callers; while an old worker may be there, no dispatcher is."""
    old = site.worker("old")
    new = site.worker("new")
    site.web("new", "one_of_each")
    site.web("old", "parents", "6")
    # Whoever ran a parent called the other task in the way of its side; what the old one sent
    # either of them runs, and what the new one recorded waits.
    eventually(
        lambda: site.ran("parent") == 6 and site.ran("add") == site.runs_of("old", "parent"),
        message=lambda: str(site.runs()),
    )
    assert old.terminate() == 0
    recorded = [job for job in site.jobs() if job.published_at is None and job.state == "queued"]
    assert len(recorded) == 2 + site.runs_of("new", "parent")

    site.dispatcher()

    eventually(lambda: all(job.state == "succeeded" for job in site.jobs()))
    assert (site.ran("add"), site.ran("clean")) == (7, 1)
    assert new.alive


def test_an_old_worker_cannot_run_what_new_callers_record(site: Site) -> None:
    """Why the order matters, and what it costs to get it wrong."""
    site.settings["outbox_republish_after"] = 1.0
    old = site.worker("old")
    site.dispatcher()
    site.web("new", "one_of_each")

    # It knows nothing of jobs: it calls the body with the arguments of the message, which has none.
    eventually(lambda: "TypeError" in old.log())
    eventually(lambda: site.runs()["old clean"] >= 1)
    assert old.terminate() == 0
    site.worker("new")

    # The broker has lost the message, so far as the outbox can tell: nothing recorded is lost.
    for job_id in ("add", "clean"):
        assert site.reaches(job_id, "succeeded").attempt == 1
        assert "republished" in site.events(job_id)
    assert site.runs()["new add 1 2"] == 1
    # But a body that needs no arguments has run at the old worker as well.
    assert site.runs()["new clean"] == 1


@pytest.fixture
def own(
    processes: Processes, tmp_path: Path, postgresql_url: str, own_vhost: str
) -> Iterator[Site]:
    """A site whose RabbitMQ may be commanded; without a result backend."""
    site = Site(processes, tmp_path, postgresql_url, own_vhost)
    yield site
    site.close()


def test_a_queue_that_is_there_gets_its_dead_letters_from_a_policy(
    own: Site, own_rabbitmq: Rabbitmq
) -> None:
    assert own.worker("old").terminate() == 0
    own.web("old", "failure", "old")

    # Declared with dead letters, it is refused: a worker cannot consume it.
    refused = own.start("new", "worker", "-P", "solo", queues="celery+")
    assert refused.wait(60) != 0
    assert "PRECONDITION_FAILED" in refused.log()
    assert own.depth("celery") == 1

    own_rabbitmq.set_policy(own.vhost, *policy_of_the_page())
    own.settings["outbox_dead_letter"] = "broker"
    own.dispatcher()
    own.worker("new")
    own.web("new", "failure", "new")

    for job_id in ("refuse-old", "refuse-new"):
        own.reaches(job_id, "quarantined")
    # One copy of each, made by the broker.
    eventually(lambda: own.depth("outbox.quarantine") == 2)
    for job_id in ("refuse-old", "refuse-new"):
        assert "copied" not in own.events(job_id)
    assert own.depth("celery") == 0


def test_the_way_back_ends_what_is_recorded_at_the_new_processes(site: Site) -> None:
    dispatcher, new = site.dispatcher(queues="shop+"), site.worker("new", queues="shop+")
    site.web("new", "parents", "3", queues="shop+")
    site.web("new", "appointment", queues="shop+")

    # Callers first, then workers.
    site.worker("old")
    site.web("old", "parents", "3")

    eventually(lambda: site.runs_of("old", "add") == 3 and site.runs_of("new", "add") == 3)
    eventually(
        lambda: [job.id for job in site.jobs() if job.state != "succeeded"] == ["appointment"]
    )
    assert site.open() == ["appointment"]
    assert site.command("cancel", "appointment")
    assert site.open() == []
    assert (dispatcher.terminate(), new.terminate()) == (0, 0)
    site.web("old", "parents", "1")
    eventually(lambda: site.runs_of("old", "add") == 4)
    assert site.runs_of("new", "add") == 3
