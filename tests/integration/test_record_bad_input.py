"""What cannot be recorded is an error at the call, and leaves nothing half-written."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from celery_outbox import (
    ConfigurationError,
    FileStore,
    InvalidJobId,
    OutboxTask,
    PayloadTooLarge,
    RecordError,
    UnserializableArgument,
)
from celery_outbox.exceptions import InvalidResultKey
from tests.factories import Database, add_task, open_outbox

NOTHING = (0, 0, 0)


class Order:
    """An object that JSON does not know."""

    def __repr__(self) -> str:
        return "s3cret"


@pytest.fixture
def export(outbox):
    return add_task(outbox.app)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        ((1, Order()), {}, "argument 1"),
        ((), {"order": Order()}, "argument 'order'"),
        (([1, {"orders": [Order()]}],), {}, r"argument 0 \(type Order, inside a list\)"),
        ((1,), {"a": 1, "b": {"c": (Order(),)}}, r"argument 'b' \(type Order, inside a dict"),
        (({1, 2}, object()), {}, "argument "),
    ],
)
def test_an_argument_that_cannot_be_serialized_is_named_but_not_shown(
    export, recorded, args, kwargs, culprit
):
    with pytest.raises(UnserializableArgument, match=rf"Task shop\.export .*{culprit}") as raised:
        export.apply_async(args, kwargs)
    assert "s3cret" not in str(raised.value)
    assert recorded.counts() == NOTHING


@pytest.mark.parametrize("option", ["link", "link_error"])
def test_a_callback_that_cannot_be_serialized_is_an_error_too(export, recorded, option):
    with pytest.raises(UnserializableArgument, match=r"Task shop\.export .*options \(link"):
        export.apply_async((1,), **{option: export.s(Order())})
    assert recorded.counts() == NOTHING


def test_a_circular_argument_is_an_error_at_the_call(export, recorded):
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(UnserializableArgument, match="argument 0"):
        export.delay(circle)
    assert recorded.counts() == NOTHING


def test_a_header_that_the_database_cannot_keep_is_an_error_at_the_call(export, recorded):
    with pytest.raises(RecordError, match=r"shop\.export"):
        export.apply_async((1,), headers={"order": Order()})
    assert recorded.counts() == NOTHING


def test_the_callers_transaction_goes_on_after_a_refused_call(outbox, export, recorded):
    with Session(outbox.engine) as session:
        export.apply_async((1,), session=session)
        for refused in ({"args": (Order(),)}, {"args": (), "task_id": ""}):
            with pytest.raises(RecordError):
                export.apply_async(session=session, **refused)
        assert session.execute(text("SELECT 1")).scalar_one() == 1
        export.apply_async((2,), session=session)
        session.commit()
    assert recorded.counts() == (2, 2, 2)


@pytest.mark.parametrize(
    "job_id",
    ["", "x" * 256, "a\x00b", "a\nb", 42, b"export-42", ["x"]],
    ids=lambda value: repr(value)[:12],
)
def test_an_id_that_is_none_says_what_an_id_is(export, recorded, job_id):
    with pytest.raises(InvalidJobId, match="Pass a task_id of 1 to 255 characters"):
        export.apply_async((1,), task_id=job_id)
    assert recorded.counts() == NOTHING


@pytest.mark.parametrize("job_id", ["x", "x" * 255, "\U0001f4c8" * 255, "export 42/2026-01", "'--"])
def test_any_text_of_up_to_255_characters_is_an_id(export, recorded, job_id):
    assert export.apply_async((1,), task_id=job_id).id == job_id
    assert recorded.job(job_id).id == job_id


def test_nul_in_an_argument_arrives_as_it_was(export, recorded):
    result = export.delay("a\x00b", note="\x00")
    args, kwargs, _ = json.loads(recorded.job(result.id).body)
    assert (args, kwargs) == (["a\x00b"], {"note": "\x00"})


def test_an_argument_of_twenty_megabytes_is_refused_with_the_limit(export, recorded):
    with pytest.raises(PayloadTooLarge, match=r"shop\.export .* 200\d{5} bytes.*limit is 16777216"):
        export.delay("x" * 20_000_000)
    assert recorded.counts() == NOTHING


def test_an_argument_of_twenty_megabytes_is_recorded_where_the_limit_permits(installed_url):
    limit = 32 * 1024 * 1024
    with open_outbox(installed_url, init=False, outbox_max_payload_size=limit) as outbox:
        result = add_task(outbox.app).delay("x" * 20_000_000)
        job = Database(outbox.engine, outbox.tables).job(result.id)
    assert len(job.body) > 20_000_000


def test_the_limit_counts_what_is_stored_and_is_exact(installed_url):
    with open_outbox(installed_url, init=False, outbox_max_payload_size=5000) as outbox:
        export = add_task(outbox.app)
        compressed = export.apply_async(("x" * 9000,), compression="gzip")
        size = len(Database(outbox.engine, outbox.tables).job(export.delay("x").id).body)
        assert export.delay("x" * (5001 - size)).id
        with pytest.raises(PayloadTooLarge):
            export.delay("x" * (5002 - size))
        assert outbox.job(compressed.id).state == "queued"


@pytest.mark.parametrize(("args", "job_id"), [(("..",), "1"), ((), "1"), (("a",), "j" * 250)])
def test_a_result_key_that_cannot_be_used_is_an_error_at_the_call(
    outbox, recorded, tmp_path, args, job_id
):
    outbox._result_store = FileStore(tmp_path)
    export = add_task(outbox.app, result_key="{0}/reports.{job_id}.csv")
    with pytest.raises(InvalidResultKey, match=r"shop\.export"):
        export.apply_async(args, task_id=job_id)
    assert recorded.counts() == NOTHING


def test_a_result_key_without_a_result_store_is_an_error_at_the_call(outbox, recorded):
    with pytest.raises(ConfigurationError, match="outbox_result_store"):
        add_task(outbox.app, result_key="{job_id}").delay()
    assert recorded.counts() == NOTHING


def test_a_result_key_is_filled_when_the_call_is_recorded(outbox, recorded, tmp_path):
    outbox._result_store = FileStore(tmp_path)
    export = add_task(outbox.app, result_key="reports/{0}-{job_id}.csv")
    export.apply_async((42,), task_id="export")
    assert recorded.job("export").result_key == "reports/42-export.csv"


@pytest.mark.parametrize("attempts", [0, -1, "3"])
def test_a_limit_of_attempts_that_is_none_is_an_error_at_the_call(outbox, recorded, attempts):
    with pytest.raises((RecordError, ConfigurationError, ValueError, TypeError)):
        add_task(outbox.app, max_attempts=attempts).delay()
    assert recorded.counts() == NOTHING


def test_a_task_name_that_is_too_long_for_its_column_is_an_error_at_the_call(outbox, recorded):
    with pytest.raises(RecordError, match="255"):
        add_task(outbox.app, name="shop." + "x" * 255).delay()
    assert recorded.counts() == NOTHING


def test_the_old_message_protocol_is_refused(outbox, recorded):
    outbox.app.conf.task_protocol = 1
    with pytest.raises(ConfigurationError, match="protocol 2"):
        add_task(outbox.app).delay()
    assert recorded.counts() == NOTHING


def test_arguments_that_the_body_does_not_take_are_refused_as_celery_does(outbox, recorded):
    with pytest.raises(TypeError, match="argument"):
        add_task(outbox.app, takes_two).delay(1, 2, 3)
    assert recorded.counts() == NOTHING
    assert issubclass(outbox.app.Task, OutboxTask)


def takes_two(number: int, at: datetime | None = None) -> int:
    return number
