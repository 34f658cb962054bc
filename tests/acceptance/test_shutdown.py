"""A worker ends, or is told to stop a body, while the body runs: in every pool.

The body waits for a file; what the worker does about it depends on what its pool can do.
"""

from __future__ import annotations

import signal

import celery
import pytest

from tests.acceptance.conftest import POOLS, on_rabbitmq
from tests.acceptance.system import System
from tests.processes import ProcessGroup
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually

#: Pools that cannot stop a body: it runs to its end. gevent can in newer versions.
UNSTOPPABLE = {"threads", "solo"} | ({"gevent"} if celery.VERSION < (5, 5) else set())


@pytest.mark.parametrize("pool", POOLS)
@on_rabbitmq
def test_each_way_to_end_a_worker(system: System, pool: str) -> None:
    system.dispatcher()

    # Warm: it waits for the body.
    warm = _worker_in_a_body(system, pool, "warm")
    warm.send(signal.SIGTERM)
    eventually(lambda: "Warm shutdown" in warm.log())
    _go(system, "warm")
    assert warm.wait(60) == 0
    job = system.reaches("warm", "succeeded")
    assert (job.attempt, system.runs("warm")) == (1, 1)

    # Cold: prefork stops the body, and says so. The others cannot be told to wait either.
    cold = _worker_in_a_body(system, pool, "cold")
    cold.send(signal.SIGQUIT)
    # Celery 5.7 says "Cold shutdown" when it is over.
    eventually(lambda: "Cold shutdown" in cold.log() or "terminate all running" in cold.log())
    if pool == "prefork":
        job = system.reaches("cold", "retrying", deadline=60)
        assert (job.attempt, job.error_code) == (1, "worker_stopped")
    _go(system, "cold")
    cold.wait(60)

    # Killed: the database alone knows that somebody had the job.
    killed = _worker_in_a_body(system, pool, "killed")
    killed.kill()
    _go(system, "killed")
    last = system.worker("-c", "2", pool=pool)
    job = system.reaches("killed", "succeeded", deadline=60)
    assert (job.attempt, system.runs("killed")) == (2, 2)
    assert "rescued" in system.events("killed")

    job = system.reaches("cold", "succeeded", deadline=60)
    assert job.attempt == system.runs("cold")
    assert job.attempt == 2 if pool == "prefork" else job.attempt in (1, 2)
    _leaves_nothing(system, last)


@pytest.mark.parametrize(
    ("signals", "environment"),
    [
        ([signal.SIGINT, signal.SIGINT], {}),
        ([signal.SIGTERM], {"REMAP_SIGTERM": "SIGQUIT"}),
    ],
    ids=["twice-ctrl-c", "remapped-sigterm"],
)
@on_rabbitmq
def test_other_ways_to_a_cold_shutdown(
    system: System, signals: list[int], environment: dict[str, str]
) -> None:
    system.dispatcher()
    cold = _worker_in_a_body(system, "prefork", "cold", **environment)
    *first, last_one = signals
    for each in first:
        cold.send(each)
        eventually(lambda: "Warm shutdown" in cold.log())
    cold.send(last_one)

    assert system.reaches("cold", "retrying").error_code == "worker_stopped"
    cold.wait(60)
    _go(system, "cold")
    last = system.worker()
    assert system.reaches("cold", "succeeded").attempt == 2
    _leaves_nothing(system, last)


@on_rabbitmq
def test_a_soft_shutdown_gives_the_body_its_time(system: System) -> None:
    """Longer than the lease, which is kept meanwhile; Celery 5.4 does not know the setting."""
    settings = system.environment["SHOP_SETTINGS"]
    patient = settings.replace("{", '{"worker_soft_shutdown_timeout": 4.0, ', 1)
    system.dispatcher()
    soft = _worker_in_a_body(system, "prefork", "short", SHOP_SETTINGS=patient)
    until = system.job("short").lease.until
    soft.send(signal.SIGQUIT)
    if celery.VERSION >= (5, 5):
        eventually(lambda: "Initiating Soft Shutdown" in soft.log())
        eventually(lambda: system.job("short").lease.until > until)
    _go(system, "short")
    soft.wait(60)
    last = system.worker()

    job = system.reaches("short", "succeeded")
    if celery.VERSION >= (5, 5):
        assert (job.attempt, system.runs("short")) == (1, 1)
    assert system.runs("short") == job.attempt
    _leaves_nothing(system, last)


@pytest.mark.parametrize("pool", POOLS)
@on_rabbitmq
def test_a_body_is_stopped_where_the_pool_can(
    system: System, rabbitmq_api: RabbitmqApi, pool: str
) -> None:
    settings = system.environment["SHOP_SETTINGS"]
    option = '"worker_cancel_long_running_tasks_on_connection_loss": true, '
    cancelling = settings.replace("{", "{" + option, 1)
    system.dispatcher()
    worker = _worker_in_a_body(
        system, pool, "revoked", "-c", "1", task="shop.wait_once", SHOP_SETTINGS=cancelling
    )
    system.shop.add.apply_async((1, 2), task_id="waiting")
    eventually(lambda: system.job("waiting").published_at)
    eventually(lambda: system.depth("celery") == 0)

    # By a person, in the last permitted attempt; what waits in the worker must not begin.
    for name in ("revoked", "waiting"):
        system.shop.app.control.revoke(name, terminate=True)
    if pool not in UNSTOPPABLE:
        assert system.reaches("revoked", "cancelled").attempt == 1
    else:
        if pool != "solo":
            eventually(lambda: "outbox.cannot_stop job=waiting" in worker.log())
        _go(system, "revoked")
        assert system.reaches("revoked", "succeeded").attempt == 1
    if pool == "solo":
        # It hears of a revoke when the body is over, and may have begun the next one by then.
        eventually(lambda: system.job("waiting").state in ("succeeded", "cancelled"))
    else:
        assert system.reaches("waiting", "cancelled").attempt == 0
        assert system.runs("waiting") == 0
    assert system.runs("revoked") == 1

    # By the loss of the broker's connection; solo notices it when the body is over.
    if pool != "solo":
        system.shop.wait_for.apply_async(("go-long", 120.0), task_id="long")
        eventually(lambda: system.runs("long") == 1)
        eventually(lambda: _broker_lost(rabbitmq_api, worker), interval=0.5)
        if pool in UNSTOPPABLE:
            eventually(lambda: "outbox.cannot_stop job=long" in worker.log())
        else:
            eventually(lambda: "retrying" in system.events("long"))
            code = "greenlet.GreenletExit" if pool == "gevent" else "worker_stopped"
            assert code in [event.error_code for event in _journal(system, "long")]
        _go(system, "long")
        job = system.reaches("long", "succeeded", deadline=60)
        assert job.attempt == system.runs("long") == (1 if pool in UNSTOPPABLE else 2)

    system.shop.add.apply_async((1, 2), task_id="next")
    system.reaches("next", "succeeded", deadline=60)
    _leaves_nothing(system, worker)


def _broker_lost(rabbitmq_api: RabbitmqApi, worker: ProcessGroup) -> bool:
    """Close what connections the broker knows of; whether the worker has lost the one it needs."""
    if "onnection to broker lost" not in worker.log():
        rabbitmq_api.close_connections()
        return False
    return True


def _journal(system: System, job_id: str) -> list:
    return system.outbox.control.journal(job_id)


def _worker_in_a_body(
    system: System,
    pool: str,
    name: str,
    *arguments: str,
    task: str = "shop.wait_for",
    **more: str,
) -> ProcessGroup:
    """Start a worker, and wait until it is in the body of a job of this name."""
    system.shop.app.tasks[task].apply_async((f"go-{name}", 120.0), task_id=name)
    worker = system.worker(*(arguments or ("-c", "2")), pool=pool, **more)
    system.reaches(name, "running", deadline=60)
    eventually(lambda: system.runs(name) == 1)
    return worker


def _go(system: System, name: str) -> None:
    (system.folder / f"go-{name}").touch()


def _leaves_nothing(system: System, worker: ProcessGroup) -> None:
    """No message is left, ready or not: the broker makes those of a worker that is gone ready."""
    eventually(lambda: "ready." in worker.log())
    eventually(lambda: system.depth("celery") == 0)
    assert worker.terminate(60) == 0
    if system.depth("celery"):
        # Celery 5.4 ends without its last acknowledgements.
        assert celery.VERSION < (5, 5)
        last = system.worker()
        eventually(lambda: "ready." in last.log())
        eventually(lambda: system.depth("celery") == 0)
        assert last.terminate() == 0
    assert system.depth("celery") == 0
    assert system.depth("outbox.quarantine") == 0
