"""A real process is killed at every boundary, on every broker: nothing is lost or done twice.

``docs/crash-matrix.rst`` shows what these tests observe. After a change that it should show::

    OUTBOX_WRITE_DOCS=1 pytest tests/acceptance/test_crash_matrix.py
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from celery_outbox.core.states import State
from celery_outbox.queues import consumes_quorum_queues
from celery_outbox.testing import BOUNDARIES
from tests.acceptance.crash import facts as observed
from tests.acceptance.crash import scenarios
from tests.acceptance.crash.bench import JOB, Bench, Broker, eventually
from tests.acceptance.crash.facts import BROKERS, Facts
from tests.acceptance.crash.invariants import broken
from tests.acceptance.crash.page import PAGE, render
from tests.acceptance.crash.scenarios import SCENARIOS, Scenario, Stage
from tests.faults import ForkServer
from tests.watchdog import Watchdog

#: Rows that run side by side: most of a row's time is a lease or a timeout that must end.
SIDE_BY_SIDE = 8

#: What this Celery can consume.
USABLE = [name for name in BROKERS if name != "rabbitmq-quorum" or consumes_quorum_queues()]


@pytest.fixture(scope="module")
def fork_server(watchdog: Watchdog) -> Iterator[ForkServer]:
    """Starts processes in milliseconds."""
    server = ForkServer(watchdog)
    yield server
    server.close()


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Broker:
    """A broker of the kind that the test names."""
    name = request.param
    url = request.getfixturevalue("redis_url" if name == "redis" else "rabbitmq_url")
    return Broker(name, url, name.partition("-")[2])


@pytest.mark.parametrize("stage", Stage, ids=str)
@pytest.mark.parametrize("broker", USABLE, indirect=True)
def test_nothing_is_lost_and_nothing_runs_twice_for_good_whoever_dies(
    broker: Broker,
    stage: Stage,
    postgresql_url: str,
    fork_server: ForkServer,
    tmp_path: Path,
) -> None:
    def run(scenario: Scenario) -> Facts:
        folder = tmp_path / scenario.name
        bench = Bench(scenario.name, broker, postgresql_url, folder, fork_server, scenario.settings)
        try:
            return play(scenario, bench)
        except BaseException as error:
            logs = sorted(folder.glob("*.log"))
            printed = "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
            raise AssertionError(f"{printed}\n{scenario.name} on {broker.name}: {error}") from error
        finally:
            bench.close()

    rows = scenarios.of(stage)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        futures = [pool.submit(run, scenario) for scenario in rows]
    failures = [str(error) for future in futures if (error := future.exception()) is not None]
    assert not failures, "\n\n".join(failures)
    found = {scenario.name: future.result() for scenario, future in zip(rows, futures, strict=True)}
    if observed.writes():
        observed.write(broker.name, found)
        PAGE.write_text(render(SCENARIOS, observed.committed()))
    shown = observed.committed()[broker.name]
    assert {name: shown.get(name) for name in found} == found


def test_the_page_shows_what_was_observed_of_every_row_on_every_broker() -> None:
    facts = observed.committed()
    names = {scenario.name for scenario in SCENARIOS}

    assert {broker: set(rows) for broker, rows in facts.items()} == dict.fromkeys(BROKERS, names)
    assert PAGE.read_text() == render(SCENARIOS, facts)


def test_every_boundary_has_a_row() -> None:
    named = [name for scenario in SCENARIOS for name in scenario.death.boundaries]

    assert sorted(set(named)) == sorted(BOUNDARIES)


def play(scenario: Scenario, bench: Bench) -> Facts:
    """Bring the death about, let the survivors go on, and see that all is well."""
    scenario.death.happen(bench)
    job = bench.job()
    at_death = (
        None if job is None else str(job.state),
        0 if job is None else job.attempt,
        bench.unpublished(),
        bench.in_broker(),
        bench.in_quarantine(),
    )
    if scenario.asks_again:
        bench.shop.ask_for("export", JOB)
    bench.recovers(*scenario.jobs)

    succeeds = scenario.end is State.SUCCEEDED
    for job_id in scenario.jobs:
        job = bench.job(job_id)
        assert job is not None
        assert (job.state, job.attempt) == (scenario.end, scenario.attempts), bench.journal(job_id)
        assert broken(bench.journal(job_id), job) == []
        assert bench.runs(job_id) == scenario.runs
        assert (job.result is not None) == succeeds
    whole = sorted(scenario.jobs) if succeeds and not scenario.transactional else []
    assert (bench.effects(), bench.results()) == (whole, whole)
    booked = bench.booked()
    assert booked == ([JOB] if scenario.transactional else [])
    assert (bench.unpublished(), bench.in_broker()) == (0, 0)
    # RabbitMQ moves a rejected message when it has the time.
    eventually(lambda: bench.in_quarantine() == scenario.copies)
    listed = [entry.id for entry in bench.outbox.control.quarantined()]
    assert listed == ([JOB] if scenario.end is State.QUARANTINED else [])
    return Facts(
        *at_death,
        end=str(scenario.end),
        attempts=scenario.attempts,
        runs=scenario.runs,
        effects=(bench.effects() + booked).count(JOB),
        copies=scenario.copies,
    )
