"""The other driver for PostgreSQL: recorded, dispatched, run, retried and settled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.processes import Processes
from tests.wait import eventually


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_psycopg_3_does_what_psycopg2_does(
    processes: Processes, tmp_path: Path, postgresql_url: str, rabbitmq_url: str, pool: str
) -> None:
    folder = tmp_path / "shop"
    folder.mkdir()
    url = postgresql_url.replace("+psycopg2", "+psycopg")
    assert "+psycopg:" in url
    # Only a commit wakes the dispatcher in time.
    settings = {"outbox_poll_interval": 300.0}
    system = System("psycopg", processes, folder, url, rabbitmq_url, settings=settings)
    try:
        dispatcher = system.dispatcher()
        eventually(lambda: "dispatcher_started" in dispatcher.log())
        system.worker("-c", "2", pool=pool)
        for name in ("first", "second"):
            system.shop.add.apply_async((f"ärger\x00{name}", "!"), task_id=name)
            assert system.reaches(name, "succeeded").attempt == 1
        system.shop.refuse.apply_async(("x",), task_id="refused")
        assert system.reaches("refused", "quarantined").reason == "permanent"
        system.shop.insist.apply_async(task_id="insists")
        assert system.reaches("insists", "succeeded").attempt == 6
        job = system.shop.wait_for.apply_async(("go",), task_id="slow")
        system.reaches(job.id, "running")
        (folder / "go").touch()
        assert system.reaches(job.id, "succeeded").attempt == 1
        eventually(lambda: system.depth("celery") == 0)
        assert "listen_" not in dispatcher.log()
    finally:
        system.close()
