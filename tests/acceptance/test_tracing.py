"""A trace that begins in the caller goes on in the worker's body, with other people's libraries."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from celery_outbox.core.states import State
from tests.factories import open_database
from tests.processes import Processes
from tests.wait import eventually

APP = "tests.acceptance.traced"

#: How often the body of each call runs.
RUNS = {
    "call-1": 1,
    "signature-1": 1,
    "name-1": 1,
    "headers-1": 1,
    "link-1": 1,
    "linked-1": 1,
    "own-1": 1,
    "flaky-1": 2,
    "refuse-1": 1,
}


class Traced:
    """What an app with a tracing library has sent, and the jobs that it has left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, *what: str) -> list[dict[str, Any]]:
        file = self.folder / "traces"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["what"] in what]


@pytest.fixture(params=["sentry", "opentelemetry"])
def traced(
    request: pytest.FixtureRequest, processes: Processes, tmp_path: Path, rabbitmq_url: str
) -> Traced:
    database_url = f"sqlite:///{tmp_path}/outbox.sqlite"
    environment = {
        "TRACED_WITH": request.param,
        "TRACED_FOLDER": str(tmp_path),
        "TRACED_BROKER": rabbitmq_url,
        "TRACED_DATABASE": database_url,
    }
    with open_database(database_url) as database:
        processes.celery(APP, "outbox", "dispatch", env=environment, name="dispatcher")
        options = ["-c", "2", "--without-gossip", "--without-mingle", "-l", "INFO"]
        worker = processes.celery(APP, "worker", *options, env=environment, name="worker")
        caller = processes.python("-c", f"from {APP} import call; call()", env=environment)
        assert caller.wait(60.0) == 0

        def ended() -> bool:
            states = {name: database.job(name).state for name in RUNS}
            failed = states.pop("refuse-1")
            return failed is State.QUARANTINED and set(states.values()) == {State.SUCCEEDED}

        eventually(ended, deadline=60.0)
    assert worker.terminate(60.0) == 0
    return Traced(tmp_path)


def test_a_trace_goes_on_from_the_caller_to_the_body(traced: Traced) -> None:
    [caller] = traced.lines("caller")
    bodies = traced.lines("body")
    assert Counter(body["job"] for body in bodies) == RUNS
    for body in bodies:
        assert body["current"] == caller["trace"], body
        carried = [each for each in body["headers"].values() if caller["trace"] in each]
        assert carried, body
        for value in body["headers"].values():
            assert value.count(caller["trace"]) == 1, body
    assert "s3cret" not in str(traced.lines("event", "transaction", "span"))
    if traced.lines("span"):
        check_spans(traced, caller["trace"])
    else:
        check_sentry(traced, caller["trace"])


def check_spans(traced: Traced, trace: str) -> None:
    spans = traced.lines("span")
    assert {span["trace"] for span in spans} == {trace}
    names = Counter(span["name"] for span in spans)
    assert names["run/shop.add"] == 5 + 1
    assert names["run/shop.flaky"] == 2
    assert names["run/shop.own"] == names["run/shop.refuse"] == 1
    # Each run hangs on the call that it comes from.
    calls = {span["span"] for span in spans if span["name"].startswith("apply_async/")}
    runs = [span for span in spans if span["name"].startswith("run/")]
    assert {run["parent"] for run in runs} <= calls
    failed = [span["name"] for span in runs if span["status"] == "ERROR"]
    assert failed == ["run/shop.refuse"]


def check_sentry(traced: Traced, trace: str) -> None:
    sent = traced.lines("transaction")
    assert {each["trace"] for each in sent} == {trace}
    names = Counter(each["name"] for each in sent)
    assert names == {
        "caller": 1,
        "shop.add": 6,
        "shop.own": 1,
        "shop.flaky": 2,
        "shop.refuse": 1,
    }
    assert all(each["parent"] for each in sent if each["name"] != "caller")
    # A failure that is retried is none yet.
    assert [each["error"] for each in traced.lines("event")] == [["PermanentError"]]
