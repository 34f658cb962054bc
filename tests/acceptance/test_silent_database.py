"""A database that says nothing: its connection is cut in time, and signals end a dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.processes import Processes
from tests.proxy import Proxy
from tests.wait import eventually

pytestmark = pytest.mark.once


@pytest.fixture
def proxy(postgresql_url: str, proxy_to: Callable[[str], Proxy]) -> Proxy:
    """The way of dispatchers and workers to the database."""
    return proxy_to(postgresql_url)


@pytest.fixture
def direct(
    processes: Processes, tmp_path: Path, postgresql_url: str, rabbitmq_url: str, proxy: Proxy
) -> Iterator[System]:
    """A system whose tests look directly, and whose processes go through the proxy."""
    folder = tmp_path / "shop"
    folder.mkdir()
    system = System(
        "postgresql-rabbitmq",
        processes,
        folder,
        postgresql_url,
        rabbitmq_url,
        settings={"outbox_database_timeout": 2.0},
    )
    system.environment["SHOP_DATABASE"] = proxy.url_for(postgresql_url) + "?connect_timeout=2"
    yield system
    system.close()


def test_sigterm_ends_a_dispatcher_whose_database_is_silent(direct: System, proxy: Proxy) -> None:
    dispatcher = direct.dispatcher(SHOP_TIMEOUT="600")
    direct.shop.add.apply_async((1, 2), task_id="add-1")
    eventually(lambda: direct.job("add-1").published_at is not None)
    proxy.stall()
    direct.shop.add.apply_async((1, 2), task_id="add-2")

    # The batch in flight has its time, and the process then its end.
    assert dispatcher.terminate(60) == 1
    assert "outbox.dispatcher_stuck" in dispatcher.log()
    assert direct.job("add-2").state == "queued"


def test_a_dispatcher_gives_a_silent_database_up_and_goes_on_when_it_is_back(
    direct: System, proxy: Proxy
) -> None:
    dispatcher = direct.dispatcher()
    direct.shop.add.apply_async((1, 2), task_id="add-1")
    eventually(lambda: direct.job("add-1").published_at is not None)
    proxy.stall()
    direct.shop.add.apply_async((1, 2), task_id="add-2")
    eventually(lambda: dispatcher.log().count("outbox.database_silent") >= 1)
    eventually(lambda: "outbox.dispatch_paused" in dispatcher.log())
    proxy.resume()

    eventually(lambda: direct.job("add-2").published_at is not None)
    assert dispatcher.terminate() == 0


def test_a_worker_keeps_a_finished_result_over_a_silent_database(
    direct: System, proxy: Proxy
) -> None:
    direct.shop.wait_for.apply_async(("go",), task_id="job-1")
    direct.dispatcher("--once").wait()
    worker = direct.worker()
    eventually(lambda: direct.runs("job-1") == 1)
    proxy.stall()
    (direct.folder / "go").touch()
    eventually(lambda: "during=succeeded" in worker.log())
    assert direct.job("job-1").state == "running"
    proxy.resume()

    assert direct.reaches("job-1", "succeeded").attempt == 1
    assert direct.runs("job-1") == 1
    eventually(lambda: direct.depth("celery") == 0)
    assert worker.alive
