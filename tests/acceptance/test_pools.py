"""Every way for a body to end, in every pool: a state that a person can read, and no message left.

One worker of each pool runs them all, so that no ending disturbs another job either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.acceptance import endings
from tests.acceptance.conftest import POOLS
from tests.acceptance.system import System
from tests.processes import Processes
from tests.wait import eventually


class End(NamedTuple):
    """What an ending leaves behind."""

    state: str
    reason: str | None = None
    error_code: str | None = None
    attempt: int = 1


def exhausted(code: str, reason: str = "attempts_exhausted") -> End:
    """Both permitted attempts ended like that."""
    return End("quarantined", reason, code, 2)


def code_of(kind: type[BaseException]) -> str:
    """The error code of this class: Python 3.10 has no exception groups of its own."""
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


ANYWHERE = {
    "returns": End("succeeded"),
    "closes-stdout-and-moves": End("succeeded"),
    "sys-exit": exhausted("SystemExit", "lost_worker"),
    "keyboard-interrupt": exhausted("KeyboardInterrupt", "lost_worker"),
    "cancelled-error": exhausted("asyncio.exceptions.CancelledError", "lost_worker"),
    "greenlet-exit": exhausted("greenlet.GreenletExit", "lost_worker"),
    "memory-error": exhausted("MemoryError"),
    "recursion-error": exhausted("RecursionError"),
    "exception-group": exhausted(code_of(endings.ExceptionGroup)),
    "base-exception-group": exhausted(code_of(endings.BaseExceptionGroup), "lost_worker"),
    "unpicklable": exhausted(code_of(endings.Unpicklable)),
    "unbuildable": exhausted(code_of(endings.Unbuildable)),
    "hostile-text": exhausted(code_of(endings.HostileText)),
    "hostile-reduce": exhausted(code_of(endings.HostileReduce)),
    "hostile-result": End("quarantined", "permanent", "kombu.exceptions.EncodeError"),
}


#: The pools that can do it at all: see celery_outbox/execute/celery_versions.py.
ONLY_IN = {
    "prefork": {
        "killed": exhausted("lost_worker", "lost_worker"),
        "os-exit": exhausted("lost_worker", "lost_worker"),
        "soft-limit": exhausted("billiard.exceptions.SoftTimeLimitExceeded", "time_limit"),
        "soft-limit-caught": End("succeeded"),
        "hard-limit": exhausted("time_limit", "time_limit"),
    },
    "gevent": {"hard-limit": exhausted("time_limit", "time_limit")},
}

LIMITS = {
    "hard-limit": {"time_limit": 1},
    "soft-limit": {"soft_time_limit": 1},
    "soft-limit-caught": {"soft_time_limit": 1},
}

#: What a user may have set for his tasks; none of it may lose a job or deliver one for ever.
SETTINGS = {
    "task_acks_late": False,
    "task_acks_on_failure_or_timeout": True,
    "task_reject_on_worker_lost": True,
    "worker_lost_wait": 0.5,
}


@pytest.fixture
def shop(
    request: pytest.FixtureRequest,
    processes: Processes,
    tmp_path: Path,
    postgresql_url: str,
    redis_url: str,
) -> Iterator[System]:
    """A system whose results Celery keeps in Redis."""
    broker = redis_url if request.param == "redis" else request.getfixturevalue("rabbitmq_url")
    folder = tmp_path / "shop"
    folder.mkdir()
    made = System(
        f"postgresql-{request.param}",
        processes,
        folder,
        postgresql_url,
        broker,
        settings={**SETTINGS, "result_backend": redis_url},
    )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("shop", "pool"),
    [*(("rabbitmq", pool) for pool in POOLS), ("redis", "prefork"), ("redis", "threads")],
    indirect=["shop"],
)
def test_each_way_to_end_a_body(shop: System, pool: str) -> None:
    tasks = shop.shop.app.tasks
    ends = {**ANYWHERE, **ONLY_IN.get(pool, {})}
    for name in ends:
        tasks["shop.end"].apply_async((name,), task_id=name, **LIMITS.get(name, {}))
    worst = "os-exit" if pool == "prefork" else "sys-exit"
    ends["stubborn"] = exhausted(
        "lost_worker" if pool == "prefork" else "SystemExit", "lost_worker"
    )
    tasks["shop.end_stubborn"].apply_async((worst,), task_id="stubborn")
    tasks["shop.end_ignored"].apply_async((worst,), task_id="ignored")
    tasks["shop.end_noted"].apply_async((worst,), task_id="noted")
    tasks["shop.end_late"].apply_async(task_id="late")
    shop.dispatcher()
    worker = shop.worker("-c", "3", pool=pool)

    for name, end in ends.items():
        job = shop.reaches(name, end.state, deadline=60)
        assert End(job.state, job.reason, job.error_code, job.attempt) == end, name
        assert shop.runs(name) == end.attempt, name
        assert what_happened(shop, name) == journal_of(end), name
        assert seen_by_celery(shop, name, end), name
    assert shop.reaches("ignored", "quarantined", deadline=60).attempt == 2
    shop.reaches("noted", "quarantined", deadline=60)
    eventually(lambda: shop.shop.app.AsyncResult("noted").state == "FAILURE")
    assert shop.shop.app.AsyncResult("ignored").state == "PENDING"
    # Its callbacks might have been missing, so its message came once more.
    eventually(lambda: shop.job("late").deliveries == 2)
    assert (shop.job("late").state, shop.runs("late")) == ("succeeded", 1)

    quarantined = {name for name, end in ends.items() if end.state == "quarantined"}
    quarantined |= {"ignored", "noted"}
    eventually(lambda: shop.depth("outbox.quarantine") == len(quarantined))
    eventually(lambda: unacknowledged_on_redis(shop) == 0)
    # A worker that ends gives back what it has not acknowledged.
    assert worker.terminate(60) == 0
    assert shop.depth("celery") == 0
    assert unacknowledged_on_redis(shop) == 0
    copies = [shop.take("outbox.quarantine").headers["id"] for _ in quarantined]
    assert set(copies) == quarantined
    assert shop.depth("outbox.quarantine") == 0


def unacknowledged_on_redis(shop: System) -> int:
    """What kombu keeps of messages without an acknowledgement; 0 on another broker."""
    with shop.shop.app.connection_for_read() as connection, connection.channel() as channel:
        key = getattr(channel, "unacked_key", None)
        return 0 if key is None else int(channel.client.hlen(key))


def what_happened(shop: System, job_id: str) -> list[str]:
    """The journal, without the lines of the dispatcher, which may come late.

    A pool process may die while billiard sees to the end of another one, and before it has read
    that this one had begun its job. It then gives the job to a third (Celery's
    ``AsynPool.on_partial_read``): that delivery is deferred, and maintenance takes the attempt
    back, which nobody else knows to be lost.
    """
    of_nobody = ("published", "copied", "deferred")
    taken_back = {"rescued": "retrying"}
    events = [event for event in shop.events(job_id) if event not in of_nobody]
    return [taken_back.get(event, event) for event in events]


def journal_of(end: End) -> list[str]:
    """What the journal of a job with this end must say."""
    retries = ["claimed", "retrying"] * (end.attempt - 1)
    return ["recorded", *retries, "claimed", end.state]


def seen_by_celery(shop: System, job_id: str, end: End) -> str:
    """Wait until Celery's own result says the same."""
    state = {"succeeded": "SUCCESS", "quarantined": "FAILURE"}[end.state]
    return eventually(lambda: shop.shop.app.AsyncResult(job_id).state == state and state)
