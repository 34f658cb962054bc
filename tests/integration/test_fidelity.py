"""What the dispatcher publishes is what stock Celery would have published for the same call."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import trace_task_ret
from celery.exceptions import Ignore
from celery.worker.request import Request
from hypothesis import HealthCheck, given, settings
from kombu import Exchange, Queue, pools
from kombu.serialization import prepare_accept_content
from sqlalchemy import update

from celery_outbox import Outbox
from celery_outbox.core.states import State
from celery_outbox.execute.payload import decode_call
from celery_outbox.store.clock import db_after
from celery_outbox.store.job import Job
from tests.factories import Database, make_app, make_stock_app, open_database, return_nothing
from tests.integration.calls import CALLS, CONFIGURATIONS, NOW, QUEUES, TASK, TASKS, Call
from tests.integration.differences import as_claim_check, as_seen
from tests.integration.spy_transport import NOTES, SPY_TRANSPORT
from tests.wait import eventually

QUARANTINE = "outbox.quarantine"
CONTENT = ["json", "pickle", "yaml", "msgpack"]


class Pair:
    """A stock app and one with the outbox, alike in everything else."""

    def __init__(self, database: Database, conf: dict[str, Any], task: dict[str, Any]) -> None:
        conf = {
            "broker_url": "memory://",
            "broker_transport": SPY_TRANSPORT,
            "accept_content": CONTENT,
            **conf,
        }
        database.empty()
        self.database = database
        self.stock, self.ours = make_stock_app(**deepcopy(conf)), make_app(**deepcopy(conf))
        self.outbox = Outbox(self.ours, engine=database.engine)
        self.seen: dict[str, Any] = {}
        for app in (self.stock, self.ours):
            self._prepare(app, task)

    def _prepare(self, app: Celery, options: dict[str, Any]) -> None:
        def export(task: Task, *args: Any, **kwargs: Any) -> None:
            self.seen = {**vars(task.request), "got": (list(args), kwargs)}
            raise Ignore  # nothing follows

        app.now = lambda: NOW.astimezone(app.timezone)
        app._local.oid = "reply-queue"
        app.task(export, bind=True, name=TASK, shared=False, lazy=False, **options)
        app.task(return_nothing, name="shop.notify", shared=False, lazy=False)

    def dispatch(self) -> None:
        """Publish what is recorded, whenever it is due."""
        job, message = self.database.tables.job, self.database.tables.message
        self.database.execute(update(message).values(due_at=db_after(-1)))
        self.database.execute(update(job).values(available_at=db_after(-1)))
        self.outbox.dispatcher().drain()

    def run(self, app: Celery, message: Any) -> dict[str, Any]:
        """Run a message, as a worker does; returns what the body saw."""
        request = Request(message, app=app, task=app.tasks[TASK], hostname="worker")
        trace_task_ret(
            TASK,
            request.id,
            request._request_dict,
            request.body,
            request.content_type,
            request.content_encoding,
            app=app,
        )
        assert self.seen, "the body did not run"
        seen, self.seen = self.seen, {}
        return seen

    def close(self) -> None:
        self.stock.close()
        self.ours.close()


def take(app: Celery) -> Any:
    """Take the one message out of the broker; ``None``: it was dropped, for want of a queue."""
    with app.connection_for_write() as connection, connection.channel() as channel:
        taken = [
            channel.basic_get(name, no_ack=True)
            for name in list(channel.queues)
            if channel._size(name) and name != QUARANTINE
        ]
    if not taken:
        return None
    [message] = taken
    message.accept = prepare_accept_content(CONTENT)
    return message


def prepare_broker(app: Celery) -> None:
    """An empty broker, where somebody listens to the exchanges that calls may name."""
    NOTES.forget()
    # A connection of another app remembers what it has declared.
    pools.reset()
    with app.connection_for_write() as connection, connection.channel() as channel:
        for exchange, key in ((Exchange("events", type="topic"), "#"), (Exchange("plain"), None)):
            Queue("listener", exchange, key or "some.key")(channel).declare()
    NOTES.declared.clear()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    folder = tmp_path_factory.mktemp("fidelity")
    with open_database(f"sqlite:///{folder}/outbox.sqlite") as database:
        yield database


@pytest.mark.filterwarnings("ignore:(?s).*task attribute is deprecated")
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    report_multiple_bugs=False,
)
@given(call=CALLS, conf=CONFIGURATIONS, task=TASKS)
def test_a_published_call_is_the_message_of_stock_celery(database, call, conf, task):
    pair = Pair(database, conf, task)
    try:
        compare(pair, call)
    finally:
        pair.close()


def compare(pair: Pair, call: Call) -> None:
    """Make a call in both apps, and compare what comes of it at the broker and in a worker."""
    prepare_broker(pair.stock)
    try:
        call.make(pair.stock)
    except Exception:  # what stock Celery refuses, for whatever reason, is not recorded
        with pytest.raises(Exception):  # noqa: B017, PT011
            call.make(pair.ours)
        assert pair.database.counts() == (0, 0, 0)
        return
    stock, declared = NOTES.published[0], NOTES.declarations()
    message = take(pair.stock)
    prepare_broker(pair.ours)
    call.make(pair.ours)
    assert (NOTES.published, NOTES.declared) == ([], []), "a call reached the broker"
    job = pair.database.job("job-1")
    if message is not None:
        check_times(call, job, Request(message, app=pair.stock, task=pair.stock.tasks[TASK]))
        args, kwargs, embed = message.decode()
        assert decode_call(pair.ours, job) == (args, kwargs, embed)

    pair.dispatch()
    after = pair.database.job("job-1")
    if job.expires_at is not None and job.expires_at <= NOW:
        assert after.state is State.EXPIRED
        return
    if message is None:
        # What nobody would get, and nobody would miss: it is seen here.
        assert after.reason == "unroutable"
        return
    [ours] = NOTES.published
    assert ours == as_claim_check(stock, call.options)
    assert NOTES.declarations() == declared

    seen = pair.run(pair.ours, take(pair.ours))
    assert as_seen(seen) == as_seen(pair.run(pair.stock, message))


def check_times(call: Call, job: Job, request: Request) -> None:
    """Check when the job is due and when it expires: when a stock worker would think so."""
    countdown = call.options.get("countdown")
    if request.eta is None:
        assert job.available_at == job.recorded_at
    elif countdown and call.receiver != "eta":
        delay = job.available_at - job.recorded_at
        assert abs(delay - timedelta(seconds=countdown)) < timedelta(seconds=1)
    else:
        assert job.available_at == request.eta
    if request.expires is not None:
        assert job.expires_at == request.expires
    elif "expiration" not in call.options and call.receiver != "properties":
        assert job.expires_at is None


def test_a_connection_that_the_call_comes_with_is_not_used(database):
    pair = Pair(database, {}, {})
    prepare_broker(pair.ours)
    with pair.ours.connection_for_write() as connection:
        result = pair.ours.tasks[TASK].apply_async((1,), connection=connection)
    assert NOTES.published == []
    assert database.job(result.id).state is State.QUEUED
    pair.close()


def test_a_time_to_live_without_expires_ends_the_job_in_the_database(database):
    pair = Pair(database, {}, {})
    Call(options={"expiration": 0.001}).make(pair.ours)
    job = database.job("job-1")
    assert job.expires_at - job.recorded_at < timedelta(seconds=1)
    eventually(lambda: pair.dispatch() or database.job("job-1").state is State.EXPIRED)
    pair.close()


@pytest.mark.parametrize("queue", QUEUES, ids=lambda queue: getattr(queue, "name", "named"))
def test_a_queue_that_only_the_call_knows_is_declared_as_it_is(database, queue):
    pair = Pair(database, {}, {})
    try:
        compare(pair, Call([1], options={"queue": queue}))
    finally:
        pair.close()


def test_an_exchange_that_the_call_declares_is_declared_by_the_dispatcher(database):
    pair = Pair(database, {}, {})
    queue = Queue("same-name", Exchange("events", type="topic"), "#")
    declare = [Exchange("same-name", type="fanout", durable=False), queue]
    options = {"exchange": "events", "routing_key": "order.paid", "declare": declare}
    prepare_broker(pair.ours)
    pair.ours.tasks[TASK].apply_async(task_id="job-1", **options)
    pair.dispatch()
    declared = [what for what in NOTES.declarations() if "same-name" in what]
    assert len(declared) == 3, declared
    assert database.job("job-1").state is State.QUEUED
    pair.close()
