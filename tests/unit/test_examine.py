"""What the worker looks at before Celery does: nothing that Celery runs may be refused."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu.message import Message
from kombu.serialization import dumps

from celery_outbox.core.reasons import Reason
from celery_outbox.execute.examine import Fault, examine
from tests.factories import add_task, make_stock_app


def sent(app: Celery, **options: Any) -> Message:
    """Return the message of a call as a worker gets it."""
    made = app.amqp.create_task_message("job-1", "shop.export", [1], {}, **options)
    content_type, encoding, body = dumps(made.body, serializer="json")
    return Message(
        body=body,
        headers=made.headers,
        content_type=content_type,
        content_encoding=encoding,
        properties=made.properties,
    )


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"countdown": 60, "expires": 120},
        {"eta": datetime(2026, 1, 31), "expires": datetime(2030, 1, 1, tzinfo=timezone.utc)},
        {"retries": 3, "time_limit": 10, "soft_time_limit": 1.5},
        {"shadow": "other", "group_id": "g", "root_id": "r", "parent_id": "p"},
        {"callbacks": [{"task": "a"}], "errbacks": [{"task": "b"}]},
        {"chain": [{"task": "a"}], "chord": {"task": "c"}},
    ],
)
def test_what_celery_sends_passes(protocol: int, guarded: bool, options: dict[str, Any]) -> None:
    app = make_stock_app(task_protocol=protocol)
    add_task(app)
    if protocol == 1:
        options = {name: value for name, value in options.items() if name != "chain"}
    assert look(sent(app, **options), guarded=guarded) is None


def test_stamps_pass() -> None:
    stamps = {"stamped_headers": ["tenant"], "stamps": {"tenant": ["a"]}}
    assert look(new_message(**stamps)) is None


def test_a_task_without_the_outbox_may_have_any_id_and_retries() -> None:
    assert look(new_message(id=5, retries="many"), guarded=False) is None
    assert look(new_message(id=[5]), guarded=False) == Fault(Reason.MALFORMED, "malformed:id")


def test_of_an_unknown_task_nothing_more_is_asked() -> None:
    assert look(new_message(task="shop.gone", id=5, eta="soon")) is None


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1.0])
def test_a_time_limit_is_a_finite_number(limit: float) -> None:
    assert look(new_message(timelimit=[None, limit])).code == "malformed:timelimit"


def look(message: Message, guarded: bool = True) -> Any:
    """Look at a message in a worker that has the task shop.export."""
    return examine(message, {"shop.export"}.__contains__, lambda name: guarded)


def new_message(**headers: Any) -> Message:
    """Return a message without arguments."""
    return Message(
        body=b"[[], {}, {}]",
        headers={"id": "job-1", "task": "shop.export", **headers},
        content_type="application/json",
        content_encoding="utf-8",
    )
