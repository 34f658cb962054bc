"""Which closed channels are a lost connection, and which are an error that will not pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import NotFound, PreconditionFailed, RecoverableConnectionError

from celery_outbox.execute.overdue_ack import outlive_overdue_acks


def connection_that_raises(error: Exception) -> Any:
    """A connection whose next frame closes a channel."""

    def on_inbound_frame(frame: Any) -> None:
        raise error

    return SimpleNamespace(connection=SimpleNamespace(on_inbound_frame=on_inbound_frame))


@pytest.mark.parametrize(
    "text",
    [
        "PRECONDITION_FAILED - consumer ack timed out on channel 1",
        "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out. Timeout value used:"
        " 1800000 ms. This timeout value can be configured, see consumers doc guide to learn more",
    ],
)
def test_a_broker_that_would_not_wait_is_a_lost_connection(text: str) -> None:
    connection = connection_that_raises(PreconditionFailed(text, (0, 0)))
    outlive_overdue_acks(connection)
    with pytest.raises(RecoverableConnectionError, match="timed out") as raised:
        connection.connection.on_inbound_frame("frame")
    assert isinstance(raised.value.__cause__, PreconditionFailed)


@pytest.mark.parametrize(
    "error",
    [
        PreconditionFailed("PRECONDITION_FAILED - inequivalent arg 'x-queue-type'", (50, 10)),
        PreconditionFailed("PRECONDITION_FAILED - unknown delivery tag 7", (60, 80)),
        PreconditionFailed(None, (0, 0)),
        NotFound("NOT_FOUND - no queue 'consumer ack timed out'", (50, 10)),
    ],
    ids=["arguments", "tag", "nothing said", "not found"],
)
def test_any_other_error_of_a_channel_stays_what_it_is(error: Exception) -> None:
    connection = connection_that_raises(error)
    outlive_overdue_acks(connection)
    with pytest.raises(type(error)) as raised:
        connection.connection.on_inbound_frame("frame")
    assert raised.value is error


def test_a_broker_that_does_not_speak_amqp_is_left_alone() -> None:
    connection = SimpleNamespace(connection=SimpleNamespace())
    outlive_overdue_acks(connection)
    assert vars(connection.connection) == {}
