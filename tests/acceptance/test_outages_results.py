"""What a task leaves outside the database cannot be stored: Celery's own results, and files."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from celery import Celery

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.proxy import Proxy
from tests.wait import eventually


@pytest.mark.parametrize("pool", ["threads", "prefork"])
@on_rabbitmq
def test_a_result_backend_that_is_away_changes_nothing_about_the_job(
    system: System, pool: str, redis_url: str, proxy_to: Callable[[str], Proxy]
) -> None:
    backend = proxy_to(redis_url)
    settings = {
        **json.loads(system.environment["SHOP_SETTINGS"]),
        "result_backend": backend.url_for(redis_url),
        "redis_socket_connect_timeout": 1,
        # Celery would try for twenty seconds.
        "redis_retry_on_timeout": False,
        "result_backend_transport_options": {
            "retry_policy": {"max_retries": 1, "interval_start": 0, "interval_max": 0.1}
        },
    }
    system.dispatcher()
    worker = system.worker("-c", "2", pool=pool, SHOP_SETTINGS=json.dumps(settings))
    results = Celery("results", backend=redis_url, set_as_current=False)
    system.shop.add.apply_async((1, 2), task_id="before", ignore_result=False)
    assert results.AsyncResult("before").get(timeout=60) == 3

    backend.cut()
    system.shop.add.apply_async((1, 2), task_id="add-1")
    assert system.reaches("add-1", "succeeded", deadline=60).attempt == 1
    eventually(lambda: "outbox.report_failed job=add-1" in worker.log())
    backend.resume()

    # The message comes back once, for the result to be reported after all.
    assert results.AsyncResult("add-1").get(timeout=60) == 3

    backend.cut()
    system.shop.fail.apply_async(("away",), task_id="fail-1")
    system.shop.refuse.apply_async(("no",), task_id="refuse-1")
    failed = system.reaches("fail-1", "quarantined", deadline=120)
    assert (failed.attempt, failed.reason, failed.error_code) == (
        3,
        "attempts_exhausted",
        "ConnectionError",
    )
    refused = system.reaches("refuse-1", "quarantined", deadline=60)
    assert (refused.attempt, refused.reason) == (1, "permanent")
    # Nothing is left in the broker, and each body ran as often as it should.
    eventually(lambda: "outbox.report_failed job=fail-1" in worker.log())
    eventually(lambda: system.depth("outbox.quarantine") == 2, deadline=60)
    backend.resume()

    runs = [system.runs(name) for name in ("add-1", "fail-1", "refuse-1")]
    assert runs == [1, 3, 1]
    system.shop.add.apply_async((3, 4), task_id="after")
    assert results.AsyncResult("after").get(timeout=60) == 7
    eventually(lambda: system.depth("celery") == 0)
    assert worker.alive
    results.close()


#: Bytes that a file of the limited worker may have; its log stays far below.
FILE_LIMIT = 200_000


@on_rabbitmq
def test_a_disk_that_is_full_is_retried_with_its_own_code_and_leaves_no_half_file(
    system: System,
) -> None:
    settings = {**json.loads(system.environment["SHOP_SETTINGS"]), "outbox_max_attempts": 20}
    patient = {"SHOP_SETTINGS": json.dumps({**settings, "outbox_retry_delay": 0.2})}
    system.shop.export.apply_async((100_000,), task_id="large")
    with system.outbox.engine.begin() as connection:
        job = system.outbox.tables.job
        connection.execute(job.update().values(max_attempts=20))
    system.dispatcher()
    limited = system.worker(**patient, SHOP_FILE_LIMIT=str(FILE_LIMIT))
    eventually(lambda: "retrying" in system.events("large"))

    lines = system.outbox.control.journal("large")
    codes = {line.error_code for line in lines if line.event == "retrying"}
    assert codes == {"OSError:EFBIG"}
    reports = system.folder / "results" / "reports"
    # What an attempt in progress writes goes by another name.
    assert not (reports / "large.csv").exists()
    limited.terminate()
    assert list(reports.iterdir()) == []
    system.worker(**patient)

    assert system.reaches("large", "succeeded", deadline=60).attempt >= 2
    content = (reports / "large.csv").read_text().split()
    assert content == [str(number) for number in range(100_000)]
    assert [file.name for file in reports.iterdir()] == ["large.csv"]
