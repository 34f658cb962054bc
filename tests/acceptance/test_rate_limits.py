"""Rate limits: what a worker holds back for one is neither claimed nor lost, and runs once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.system import System
from tests.processes import Processes, ProcessGroup
from tests.wait import eventually

LIMITED = [f"limited-{number}" for number in range(4)]
HELD = LIMITED[1:]


@pytest.fixture(params=["rabbitmq", "redis"])
def shop(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path, postgresql_url: str
) -> Iterator[System]:
    """A system whose worker has one place for a message beside those that it holds back."""
    folder = tmp_path / "shop"
    folder.mkdir()
    made = System(
        f"postgresql-{request.param}",
        processes,
        folder,
        postgresql_url,
        request.getfixturevalue(f"{request.param}_url"),
    )
    yield made
    made.close()


def test_jobs_wait_for_a_rate_limit_in_the_worker_and_run_once(shop: System) -> None:
    for job_id in LIMITED:
        shop.shop.limited.apply_async(task_id=job_id)
    dispatcher = shop.dispatcher()
    pool = "prefork" if shop.name == "postgresql-rabbitmq" else "threads"
    worker = shop.worker("-c", "1", pool=pool)

    shop.reaches("limited-0", "succeeded")
    eventually(lambda: all(received(worker, job_id) for job_id in HELD))

    # Now a message counts as lost after a second: there are more copies than the worker has places.
    dispatcher.terminate()
    shop.dispatcher(SHOP_SETTINGS=settings(shop, outbox_republish_after=1.0))
    eventually(lambda: all(shop.events(job_id).count("republished") > 2 for job_id in HELD))
    waits(shop)
    # They keep nobody else waiting.
    run(shop, [f"other-{number}" for number in range(8)])
    waits(shop)

    [reply] = shop.shop.app.control.rate_limit(
        "shop.limited", "1000/m", reply=True, limit=1, timeout=30
    )
    assert [*reply.values()] == [{"ok": "new rate limit set successfully"}]
    for job_id in HELD:
        job = shop.reaches(job_id, "succeeded")
        assert (job.attempt, shop.runs(job_id)) == (1, 1)
    later = [f"later-{number}" for number in range(4)]
    for job_id in later:
        shop.shop.limited.apply_async(task_id=job_id)
    for job_id in later:
        assert shop.reaches(job_id, "succeeded").attempt == 1
    ran = [line.split()[0] for line in (shop.folder / "runs").read_text().splitlines()]
    assert [job_id for job_id in ran if job_id in later] == later

    # Celery would have gone on with the messages that it held after an hour: they come again.
    assert worker.terminate(60) == 0
    eventually(lambda: shop.depth("celery") >= len(HELD))
    unlimited = settings(shop, worker_disable_rate_limits=True)
    another = shop.worker("-c", "1", pool="threads", SHOP_SETTINGS=unlimited)
    eventually(lambda: all("duplicate" in shop.events(job_id) for job_id in HELD))
    eventually(lambda: shop.depth("celery") == 0)
    assert another.terminate(60) == 0
    assert shop.depth("celery") == 0
    for job_id in (*LIMITED, *later):
        job = shop.job(job_id)
        assert (job.state, job.attempt, shop.runs(job_id)) == ("succeeded", 1, 1)
        assert not {"rescued", "deferred", "retrying"} & {*shop.events(job_id)}


def settings(shop: System, **more: Any) -> str:
    """The settings of the system's processes, and more."""
    return json.dumps(json.loads(shop.environment["SHOP_SETTINGS"]) | more)


def received(worker: ProcessGroup, job_id: str) -> bool:
    """Whether the worker has the message of a job."""
    return f"Task shop.limited[{job_id}] received" in worker.log()


def waits(shop: System) -> None:
    """Check that nobody has begun what the limit holds back, and that no message is left over."""
    for job_id in HELD:
        job = shop.job(job_id)
        assert (job.state, job.attempt, job.deliveries) == ("queued", 0, 0)
        assert job.lease is None
        assert shop.runs(job_id) == 0
        assert {*shop.events(job_id)} == {"recorded", "published", "republished"}


def run(shop: System, job_ids: list[str]) -> None:
    """Run jobs of a task without a limit."""
    for job_id in job_ids:
        shop.shop.add.apply_async((1, 2), task_id=job_id)
    for job_id in job_ids:
        assert shop.reaches(job_id, "succeeded").attempt == 1
