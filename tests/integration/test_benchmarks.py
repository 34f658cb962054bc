"""The benchmarks run, and leave nothing behind; what they find is for a quiet machine."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.processes import REPOSITORY, Processes, ProcessGroup
from tests.servers.postgresql import VARIABLE as POSTGRESQL
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import API_VARIABLE as RABBITMQ_API
from tests.servers.rabbitmq import VARIABLE as RABBITMQ
from tests.servers.rabbitmq import Rabbitmq
from tests.wait import eventually

pytestmark = [pytest.mark.once, pytest.mark.slow]


@pytest.fixture
def benchmarks(
    processes: Processes, postgresql_server: Postgresql, rabbitmq_server: Rabbitmq, tmp_path: Path
):
    environment = {
        POSTGRESQL: postgresql_server.url.render_as_string(hide_password=False),
        RABBITMQ: rabbitmq_server.url,
        RABBITMQ_API: rabbitmq_server.api_url,
        "TMPDIR": str(tmp_path),
    }

    def start(*arguments: str) -> ProcessGroup:
        return processes.python(
            "-m", "benchmarks", *arguments, env=environment, cwd=REPOSITORY, name="benchmarks"
        )

    return start


def living(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition(") ")
        except OSError:
            continue
        state, _, its_group = rest.split()[:3]
        if int(its_group) == group and state != "Z":
            found.append(name)
    return found


def test_a_quick_run_measures_a_section_and_writes_it_down(benchmarks, tmp_path: Path):
    file = tmp_path / "run.json"
    run = benchmarks("--quick", "--only", "record-one", "--rounds", "1", "--json", str(file))

    assert run.wait(240) == 0, run.tail()

    document = json.loads(file.read_text())
    [section] = document["sections"]
    assert document["versions"]["celery"]
    assert section["name"] == "record-one"
    lines = {line["name"]: line for line in section["lines"]}
    for name in ("confirmed .delay()", "celery-outbox, in a transaction", "inserts alone"):
        assert len(lines[name]["rates"]) == 1
        assert lines[name]["ratio"]["median"] > 0
    assert all(line["failed"] is None for line in section["lines"])
    # Peers are measured where they are installed, and named where they are not.
    for peer in ("django-celery-outbox", "procrastinate", "pgqueuer"):
        assert (peer in lines) != (f"{peer} is not installed" in section["notes"])
    trips = section["facts"]["round trips of a transaction"]
    # Begin, the insert of its row, commit.
    assert trips["the caller's row alone"] == 3
    assert "record one, in a transaction of its own" in run.log()
    assert not list(tmp_path.glob("outbox-bench-*"))


def test_an_interrupted_run_ends_its_processes_and_removes_its_folder(benchmarks, tmp_path: Path):
    run = benchmarks("--only", "record-one", "--rounds", "50")
    eventually(lambda: "round 1/50" in run.log(), deadline=120, message=run.tail)
    assert len(living(run.pid)) > 3

    run.send(signal.SIGINT)

    assert run.wait(60) == 130, run.tail()
    assert "interrupted" in run.log()
    # Python's own helper for child processes ends when it notices that its parent has.
    eventually(lambda: not living(run.pid), message=lambda: f"these are left: {living(run.pid)}")
    assert not list(tmp_path.glob("outbox-bench-*"))
