"""What a dispatcher writes down for each answer of the broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import psycopg2
import pytest
from sqlalchemy.exc import OperationalError

from celery_outbox import Outbox
from celery_outbox.dispatch.batch import Pass
from celery_outbox.dispatch.dispatcher import Dispatcher
from celery_outbox.dispatch.publisher import Outcome, Report
from celery_outbox.dispatch.wire import Wire
from celery_outbox.operate.maintenance import Maintenance
from celery_outbox.store import job as jobs
from celery_outbox.store import messages, transitions
from tests.factories import Database, add_task, open_outbox


class Broker:
    """Answers each message as it is told, and remembers what it got."""

    def __init__(self) -> None:
        self.answers: dict[str, Outcome] = {}
        self.outage: BaseException | None = None
        self.got: list[Wire] = []

    def publish(self, wires: Sequence[Wire]) -> Report:
        """Take a batch."""
        if self.outage is not None:
            return Report(outage=self.outage)
        self.got += wires
        return Report(
            {wire.id: self.answers.get(wire.headers["id"], Outcome.CONFIRMED) for wire in wires}
        )

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def broker() -> Broker:
    """A broker that confirms everything."""
    return Broker()


@pytest.fixture
def dispatcher(outbox: Outbox, broker: Broker) -> Iterator[Dispatcher]:
    """A dispatcher that talks to ``broker``."""
    dispatcher = outbox.dispatcher()
    dispatcher._publisher = broker
    yield dispatcher
    dispatcher.close()


def record(outbox: Outbox, *job_ids: str) -> None:
    """Record jobs of one task."""
    task = outbox.app.tasks.get("shop.export") or add_task(outbox.app)
    for job_id in job_ids:
        task.apply_async(task_id=job_id)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Outcome.UNROUTABLE, "unroutable"),
        (Outcome.TOO_LARGE, "too_large"),
        (Outcome.UNPUBLISHABLE, "unpublishable"),
    ],
)
def test_a_refused_message_quarantines_its_job_and_its_neighbours_are_published(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher, answer: Outcome, reason: str
) -> None:
    record(outbox, "good", "bad", "better")
    broker.answers["bad"] = answer

    done = dispatcher.dispatch_batch()

    assert (done.published, done.refused) == (2, 1)
    bad = outbox.job("bad")
    assert (bad.state, bad.reason, bad.published_at) == ("quarantined", reason, None)
    assert outbox.job("good").published_at is not None
    [entry] = outbox.control.quarantined()
    assert entry.source == "broker"
    # Its copy for the quarantine queue goes out with the next batch.
    broker.answers.clear()
    dispatcher.dispatch_batch()
    assert broker.got[-1].headers["x-outbox-reason"] == reason
    assert [event.event for event in outbox.control.journal("bad")] == [
        "recorded",
        "quarantined",
        "copied",
    ]


def test_a_nacked_message_stays_due_and_costs_nothing(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher
) -> None:
    record(outbox, "job-1")
    broker.answers["job-1"] = Outcome.NACKED

    done = dispatcher.dispatch_batch()

    assert (done.published, done.refused) == (0, 0)
    job = outbox.job("job-1")
    assert (job.state, job.attempt, job.published_at) == ("queued", 0, None)
    waiting = outbox.database.read(lambda c: messages.seconds_until_due(c, outbox.tables))
    assert waiting is not None
    assert waiting > 0


def test_an_outage_gives_everything_back_at_once(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher
) -> None:
    record(outbox, *(f"job-{number}" for number in range(5)))
    broker.outage = ConnectionRefusedError()

    for _ in range(100):
        done = dispatcher.dispatch_batch()
        assert (done.claimed, done.published) == (5, 0)
        assert done.outage is broker.outage
    broker.outage = None

    assert dispatcher.dispatch_batch().published == 5


def test_a_worker_that_is_faster_than_the_mark_hides_no_publication(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher, recorded: Database, monkeypatch
) -> None:
    record(outbox, "job-1")
    answer = broker.publish

    def publish_and_run(wires: Sequence[Wire]) -> Report:
        report = answer(wires)
        recorded.do(run_job, "job-1")
        return report

    monkeypatch.setattr(broker, "publish", publish_and_run)
    dispatcher.dispatch_batch()

    job = outbox.job("job-1")
    assert job.state == "succeeded"
    assert job.published_at is not None
    events = [event.event for event in outbox.control.journal("job-1")]
    assert sorted(events) == ["claimed", "published", "recorded", "succeeded"]
    assert dispatcher.dispatch_batch().claimed == 0


def test_a_row_that_a_dead_dispatcher_held_is_dropped_when_its_job_has_ended(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher, recorded: Database
) -> None:
    record(outbox, "job-1")
    recorded.do(messages.claim, claim="dead", lease=-1.0, limit=10)
    recorded.do(run_job, "job-1")

    assert dispatcher.dispatch_batch().claimed == 1

    assert broker.got == []
    assert dispatcher.dispatch_batch().claimed == 0


def test_a_row_of_a_running_job_waits_for_the_end_of_the_lease(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher, recorded: Database
) -> None:
    record(outbox, "job-1")
    recorded.do(claim_job, "job-1")

    dispatcher.dispatch_batch()

    assert broker.got == []
    assert outbox.job("job-1").state == "running"
    assert dispatcher.dispatch_batch().claimed == 0


def test_a_job_whose_time_is_over_is_not_published(
    outbox: Outbox, broker: Broker, dispatcher: Dispatcher
) -> None:
    task = add_task(outbox.app)
    task.apply_async(task_id="late", expires=-5)

    dispatcher.dispatch_batch()

    assert broker.got == []
    assert outbox.job("late").state == "expired"


@pytest.mark.parametrize(
    ("heartbeat_interval", "is_postponed"), [(15.0, False), (0.01, True)], ids=["short", "long"]
)
def test_only_trouble_that_silences_workers_postpones_the_maintenance(
    installed_url: str, monkeypatch, heartbeat_interval: float, is_postponed: bool
) -> None:
    away = psycopg2.OperationalError("server closed the connection unexpectedly")
    trouble = OperationalError("", {}, away)
    batches = iter([None, trouble] * 3)
    seen: list[str] = []

    def batch() -> Pass:
        step = next(batches, "end")
        if step == "end":
            dispatcher.stop()
        elif step is not None:
            seen.append("trouble")
            raise trouble
        return Pass()

    settings = {"outbox_maintenance_interval": 0.01, "outbox_notify": False}
    settings["outbox_heartbeat_interval"] = heartbeat_interval
    with open_outbox(installed_url, init=False, **settings) as outbox:
        monkeypatch.setattr(Maintenance, "run", lambda self, keep: seen.append("maintained"))
        dispatcher = outbox.dispatcher()
        monkeypatch.setattr(dispatcher, "dispatch_batch", batch)
        dispatcher.run()
    assert ("maintained" not in seen[seen.index("trouble") :]) is is_postponed


def claim_job(connection, tables, job_id: str) -> int:
    """Do what a worker does on delivery."""
    job = jobs.lock(connection, tables, job_id)
    assert job is not None
    return transitions.claim(connection, tables, job, actor="worker", lease=60.0)


def run_job(connection, tables, job_id: str) -> None:
    """Do what a worker does from delivery to settle."""
    token = claim_job(connection, tables, job_id)
    assert transitions.succeed(
        connection,
        tables,
        job_id,
        token,
        attempt=1,
        actor="worker",
        result=b"1",
        result_type="application/json; charset=utf-8",
    )
