"""Apps as people write them, after the swap of their base class and nothing else: their calls
return ids, and their results arrive."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_outbox import Outbox
from tests.processes import Processes

SHAPES = "tests.acceptance.shapes"


class Shape:
    """An app of ours in somebody's shape, with what it needs to run."""

    def __init__(self, processes: Processes, database: str, broker: str, results: str) -> None:
        self._processes = processes
        self._environment = {
            "SHAPE_DATABASE": database,
            "SHAPE_BROKER": broker,
            "SHAPE_RESULTS": results,
        }
        app = Celery("looking", broker=broker)
        app.conf.outbox_database_url = database
        self.outbox = Outbox(app)

    def answer_by(self, results: str) -> None:
        """Take another result backend."""
        self._environment["SHAPE_RESULTS"] = results

    def serve(self, app: str, *worker: str) -> None:
        """Make the tables, and start a dispatcher and a worker, by ``celery -A``."""
        init = self._processes.celery(app, "outbox", "init", env=self._environment)
        assert init.wait(60) == 0, init.log()
        self._processes.celery(app, "outbox", "dispatch", env=self._environment)
        options = ["-c", "2", "-l", "INFO", *worker]
        self._processes.celery(app, "worker", *options, env=self._environment)

    def answers(self, module: str) -> Any:
        """What a web process, or a person in a shell, prints in the end."""
        process = self._processes.python("-m", module, env=self._environment, name="web")
        assert process.wait(120) == 0, process.log()
        return json.loads(process.log().splitlines()[-1])

    def jobs(self) -> Counter[tuple[str, str, str | None, int]]:
        """Task, state, queue and attempts of all jobs."""
        return Counter(
            (job.task.rpartition(".")[2], job.state, job.queue, job.attempt)
            for job in self.outbox.control.find(limit=1000)
        )


@pytest.fixture
def shape(
    processes: Processes, postgresql_url: str, rabbitmq_url: str, redis_url: str
) -> Iterator[Shape]:
    """PostgreSQL, RabbitMQ, and results on Redis."""
    shape = Shape(processes, postgresql_url, rabbitmq_url, redis_url)
    yield shape
    shape.outbox.engine.dispose()
    shape.outbox.app.close()


@pytest.mark.parametrize("results", ["redis", "rpc"])
def test_a_package_that_includes_its_tasks(shape: Shape, results: str) -> None:
    """Celery's "Next steps"; with the backend that it begins with, too."""
    if results == "rpc":
        shape.answer_by("rpc://")
    shape.serve(f"{SHAPES}.proj")

    assert shape.answers(f"{SHAPES}.proj.calls") == {
        "call": 4,
        "state": "SUCCESS",
        "chain": 64,
        "group": [number * 2 for number in range(10)],
        "countdown": 4,
        "partial": 10,
        "error": "TypeError",
        "failed": True,
    }
    assert shape.jobs() == Counter(
        {
            ("add", "succeeded", "celery", 1): 14,
            ("mul", "succeeded", "celery", 1): 1,
            ("add", "quarantined", "celery", 1): 1,
        }
    )


def test_a_flask_site_with_an_application_factory(shape: Shape) -> None:
    shape.serve(f"{SHAPES}.flask_site:celery_app")

    answer = shape.answers(f"{SHAPES}.flask_site")

    job = shape.outbox.job(answer.pop("result_id"))
    assert answer == {"ready": True, "successful": True, "value": "It is 3"}
    assert (job.state, job.attempt) == ("succeeded", 1)


def test_a_site_of_async_endpoints(shape: Shape) -> None:
    shape.serve(f"{SHAPES}.async_site", "-Q", "site-queue")

    answers = shape.answers(f"{SHAPES}.async_site")

    assert [(each["task_status"], each["task_result"]) for each in answers] == [
        ("SUCCESS", f"made word {number}") for number in range(5)
    ]
    assert shape.jobs() == Counter({("create", "succeeded", "site-queue", 1): 5})
