"""Delays and expiry are columns, absolute and in UTC."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery.worker.request import Request
from kombu import Exchange, Queue

from celery_outbox import RecordError
from tests.factories import Database, add_task, make_stock_app, open_outbox

SOON = timedelta(seconds=5)
NOON = datetime(2126, 1, 31, 12, 0, tzinfo=timezone.utc)
TOKYO = timezone(timedelta(hours=9))


@pytest.fixture(params=["UTC", "Asia/Tokyo"])
def outbox(request, installed_url):
    with open_outbox(installed_url, init=False, timezone=request.param) as outbox:
        yield outbox


def close(moment: datetime, seconds: float) -> bool:
    return abs(moment - datetime.now(timezone.utc) - timedelta(seconds=seconds)) < SOON


def in_stock_celery(app, option: str, value) -> datetime:
    """Return what a worker of Celery's own takes an option for."""
    stock = make_stock_app(timezone=app.conf.timezone)
    task = add_task(stock)
    message = stock.amqp.as_task_v2("1", task.name, **{option: value})
    delivered = SimpleNamespace(
        headers=message.headers,
        properties=message.properties,
        delivery_info={},
        content_type="application/json",
        content_encoding="utf-8",
        body=message.body,
    )
    request = Request(delivered, app=stock, task=task, headers=message.headers, decoded=True)
    return getattr(request, option).astimezone(timezone.utc)


def test_a_call_without_a_delay_is_due_at_once(outbox, recorded):
    job = recorded.job(add_task(outbox.app).delay().id)
    assert close(job.available_at, 0)
    assert job.expires_at is None


@pytest.mark.parametrize("seconds", [60, 0.5, timedelta(days=400).total_seconds()])
def test_a_countdown_becomes_a_time(outbox, recorded, seconds):
    result = add_task(outbox.app).apply_async(countdown=seconds)
    [message] = recorded.messages(result.id)
    assert close(recorded.job(result.id).available_at, seconds)
    assert message.due_at == recorded.job(result.id).available_at


@pytest.mark.parametrize(
    "moment",
    [
        NOON,
        NOON.astimezone(TOKYO),
        NOON.isoformat(),
        NOON.astimezone(TOKYO).isoformat(),
        "2126-01-31T12:00:00Z",
        NOON.replace(tzinfo=None),
        NOON.replace(tzinfo=None).isoformat(),
    ],
    ids=str,
)
@pytest.mark.parametrize("option", ["eta", "expires"])
def test_a_moment_is_the_one_that_a_worker_of_stock_celery_takes_it_for(
    outbox, recorded, option, moment
):
    result = add_task(outbox.app).apply_async(**{option: moment})
    column = {"eta": "available_at", "expires": "expires_at"}[option]
    stored = getattr(recorded.job(result.id), column)
    assert stored == in_stock_celery(outbox.app, option, moment)
    assert stored.tzinfo is timezone.utc


def test_the_headers_have_no_delay_left_for_a_worker_to_wait(outbox, recorded):
    for options in ({"eta": NOON}, {"countdown": 60}):
        result = add_task(outbox.app).apply_async(**options)
        assert recorded.job(result.id).envelope.headers["eta"] is None


def test_expiry_in_seconds_counts_from_the_call(outbox, recorded):
    result = add_task(outbox.app).apply_async(expires=120)
    assert close(recorded.job(result.id).expires_at, 120)


def test_the_expiry_of_the_task_counts_where_the_call_says_nothing(outbox, recorded):
    result = add_task(outbox.app, expires=120).delay()
    assert close(recorded.job(result.id).expires_at, 120)


def test_a_call_that_is_late_already_is_recorded_and_expires(outbox, recorded):
    result = add_task(outbox.app).apply_async(expires=datetime(2020, 1, 1, tzinfo=timezone.utc))
    assert outbox.maintenance.run().expired == 1
    assert recorded.events(result.id) == ["recorded", "expired"]


@pytest.mark.parametrize(
    "options", [{"eta": "tomorrow"}, {"eta": object()}, {"countdown": "soon"}, {"countdown": 1e30}]
)
def test_what_is_no_time_is_an_error_at_the_call(outbox, recorded, options):
    with pytest.raises(RecordError, match=r"shop\.export"):
        add_task(outbox.app).apply_async(**options)
    assert recorded.counts() == (0, 0, 0)


@pytest.mark.parametrize("kind", ["topic", "direct"])
def test_a_delay_leaves_the_route_to_a_quorum_queue_alone(installed_url, caplog, kind):
    # Celery's own delay would take the message through other exchanges, after ours.
    queue = Queue(
        "reports", Exchange("shop", kind), "shop.#", queue_arguments={"x-queue-type": "quorum"}
    )
    with open_outbox(installed_url, init=False, task_queues=[queue]) as outbox:
        export = add_task(outbox.app)
        with caplog.at_level(logging.WARNING):
            results = [export.apply_async(queue="reports", countdown=wait) for wait in (0, 60)]
        database = Database(outbox.engine, outbox.tables)
        plain, delayed = (database.job(result.id).envelope for result in results)
    assert (delayed.exchange, delayed.routing_key) == (plain.exchange, plain.routing_key)
    assert caplog.messages == []
