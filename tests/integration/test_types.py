"""Arguments of every type that kombu's JSON knows, also those that an older kombu has written."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from uuid import UUID

import pytest
from kombu.utils.json import register_type

from celery_outbox import Outbox, UnserializableArgument
from celery_outbox.core.states import State
from celery_outbox.store import recording
from celery_outbox.store.envelope import Envelope
from tests.factories import Database, new_job, open_outbox
from tests.integration.delivering import add_task, deliver

#: What is tested does not depend on the database's kind.
pytestmark = pytest.mark.parametrize("installed_url", ["sqlite", "postgresql"], indirect=True)

OLD_ROW = Path(__file__).parent / "data" / "recorded_with_kombu_5_3_4.json"

OLD_ARGUMENTS = [
    UUID(int=7),
    Decimal("1.10"),
    date(2026, 1, 31),
    time(1, 2, 3),
    datetime(2026, 1, 31, 12, 30),
    datetime(2026, 1, 31, 12, 30, 15, 250000, tzinfo=timezone(timedelta(hours=1))),
    b"text",
    b"\xff\x00",
    "a\x00b",
    {"nested": [Decimal("0.1"), None, True, 2**70]},
]


class Colour(Enum):
    RED = "red"


class Word(str, Enum):
    YES = "yes"


@dataclass
class Point:
    x: int


@pytest.fixture
def point_is_known() -> Iterator[None]:
    register_type(Point, "point", lambda point: [point.x], lambda value: Point(*value))
    yield
    from kombu.utils import json as kombu_json

    del kombu_json._encoders[Point], kombu_json._decoders["point"]


def test_a_row_that_an_older_kombu_has_written_runs(outbox: Outbox, recorded: Database) -> None:
    row = json.loads(OLD_ROW.read_text())
    envelope = Envelope.from_json(row["envelope"])
    assert (row["kombu"], envelope.headers["compression"]) == ("5.3.4", "application/x-gzip")
    seen = {}

    def body(task, *args, **kwargs):
        seen.update(args=list(args), kwargs=kwargs, headers=task.request.headers)

    task = add_task(outbox.app, body, bind=True)
    recorded.do(
        recording.record,
        new_job("job-1", envelope=envelope, body=b64decode(row["body"])),
        actor="caller",
    )
    assert deliver(task, "job-1") == "SUCCESS"
    when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    assert seen["args"] == OLD_ARGUMENTS
    assert [type(each) for each in seen["args"]] == [type(each) for each in OLD_ARGUMENTS]
    assert seen["kwargs"] == {"when": when}
    assert seen["headers"] == {"tenant": "7", "since": when}


def test_a_row_that_an_older_kombu_has_written_is_published(installed_url: str) -> None:
    row = json.loads(OLD_ROW.read_text())
    envelope = Envelope.from_json(row["envelope"])
    with open_outbox(installed_url, init=False, broker_url="memory://") as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        for relay in (True, False):
            job = new_job(
                f"job-{relay}", envelope=envelope, body=b64decode(row["body"]), relay=relay
            )
            recorded.do(recording.record, job, actor="caller")
        outbox.dispatcher().drain()
        with outbox.app.connection_for_read() as connection, connection.channel() as channel:
            # In full, as to another service, and as a claim check.
            in_full, claim_check = (channel.basic_get("celery", no_ack=True) for _ in range(2))
            assert channel.basic_get("celery") is None
        states = recorded.job("job-True").state, recorded.job("job-False").state
    args, kwargs, _ = in_full.decode()
    assert [type(each) for each in args] == [type(each) for each in OLD_ARGUMENTS]
    assert args == OLD_ARGUMENTS
    when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    assert kwargs == {"when": when}
    for message in (in_full, claim_check):
        assert (message.headers["tenant"], message.headers["since"]) == ("7", when)
    assert states == (State.RELAYED, State.QUEUED)


def test_a_type_that_the_app_has_registered_arrives(outbox, recorded, point_is_known):
    seen = []
    task = add_task(outbox.app, lambda *args: seen.extend(args))
    job_id = task.delay(Point(1), Word.YES).id
    assert deliver(task, job_id) == "SUCCESS"
    # A text that is an enum, too, is a text for JSON, with or without the outbox.
    assert seen == [Point(1), "yes"]
    assert recorded.job(job_id).state is State.SUCCEEDED


@pytest.mark.parametrize(
    "value",
    [Colour.RED, Point(1), timedelta(1), {1}, object()],
    ids=lambda each: type(each).__name__,
)
def test_a_type_that_celery_cannot_send_is_refused_by_name(outbox, recorded, value):
    task = add_task(outbox.app, lambda *args: None)
    with pytest.raises(UnserializableArgument, match=type(value).__name__):
        task.delay(value)
    assert recorded.counts() == (0, 0, 0)
