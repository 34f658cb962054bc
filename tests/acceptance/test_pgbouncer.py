"""PgBouncer in transaction mode: everything works through it, and the wake-up polls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.processes import Processes
from tests.servers.pgbouncer import Pgbouncer
from tests.wait import eventually
from tests.watchdog import Watchdog

pytestmark = pytest.mark.once


@pytest.fixture
def system(
    processes: Processes,
    tmp_path: Path,
    postgresql_url: str,
    rabbitmq_url: str,
    watchdog: Watchdog,
) -> Iterator[System]:
    """A system all of whose processes share three connections to the database."""
    pooler = Pgbouncer.to(postgresql_url, watchdog, mode="transaction", connections=3)
    folder = tmp_path / "shop"
    folder.mkdir()
    system = System("pooled", processes, folder, pooler.url_for(postgresql_url), rabbitmq_url)
    yield system
    system.close()
    pooler.stop()


def test_record_dispatch_run_and_maintain_through_a_pooler_that_swaps_connections(
    system: System,
) -> None:
    with system.outbox.engine.begin() as connection, system.outbox.use(connection):
        for number in range(100):
            system.shop.add.apply_async((number, 1), task_id=f"add-{number}")
        system.shop.fail.apply_async(("away",), task_id="fail")
        system.shop.wait_for.apply_async(("go",), task_id="slow")
    dispatchers = [system.dispatcher(), system.dispatcher()]
    worker = system.worker("-c", "3", pool="prefork")

    for number in range(100):
        assert system.reaches(f"add-{number}", "succeeded").attempt == 1
        assert system.runs(f"add-{number}") == 1
    assert system.reaches("fail", "quarantined").attempt == 3

    # Maintenance: the worker is gone, and another finishes its job.
    system.reaches("slow", "running")
    worker.kill()
    system.worker("-c", "3", pool="prefork")
    (system.folder / "go").touch()
    assert system.reaches("slow", "succeeded").attempt == 2

    for dispatcher in dispatchers:
        eventually(lambda log=dispatcher.log: "outbox.listen_unheard" in log())
        # Polling goes on, and it is not said again.
        system.shop.add.apply_async((1, 2), task_id=f"after-{dispatcher.pid}")
        system.reaches(f"after-{dispatcher.pid}", "succeeded")
        assert dispatcher.log().count("outbox.listen_unheard") == 1
        assert dispatcher.log().count("outbox.listen") == 1
        assert dispatcher.terminate() == 0
    eventually(lambda: system.depth("celery") == 0)
    assert system.command("status", "slow")["state"] == "succeeded"
