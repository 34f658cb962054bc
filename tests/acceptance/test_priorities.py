"""Priorities: what was recorded later and is more urgent runs first, as with plain Celery."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.processes import Processes
from tests.wait import eventually

#: From the least to the most urgent: RabbitMQ takes the largest number first, Redis the smallest.
PRIORITIES = {"rabbitmq": (1, 5, 9), "redis": (9, 5, 0)}


@pytest.fixture(params=PRIORITIES)
def shop(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path, postgresql_url: str
) -> Iterator[System]:
    """A system whose queues know priorities."""
    folder = tmp_path / "shop"
    folder.mkdir()
    redis = request.param == "redis"
    made = System(
        request.param,
        processes,
        folder,
        postgresql_url,
        request.getfixturevalue(f"{request.param}_url"),
        # The documentation of Celery: "Routing Tasks", "Redis Message Priorities".
        {"priority_steps": [0, 3, 6, 9], "queue_order_strategy": "priority"} if redis else None,
        {"worker_prefetch_multiplier": 1, "task_queue_max_priority": None if redis else 10},
    )
    yield made
    made.close()


def test_the_most_urgent_job_runs_first_however_late_it_was_recorded(shop: System) -> None:
    recorded = [
        (f"{name}-{number}", priority)
        for name, priority in zip(("least", "middle", "most"), PRIORITIES[shop.name], strict=True)
        for number in range(2)
    ]
    for job_id, priority in recorded:
        shop.shop.add.apply_async((1, 2), task_id=job_id, priority=priority)
    shop.dispatcher()
    eventually(lambda: shop.depth("celery") == len(recorded))
    shop.worker("-c", "1")

    for job_id, _ in recorded:
        assert shop.reaches(job_id, "succeeded").attempt == 1
    ran = [line.split()[0] for line in (shop.folder / "runs").read_text().splitlines()]
    assert ran == ["most-0", "most-1", "middle-0", "middle-1", "least-0", "least-1"]
