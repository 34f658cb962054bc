"""The example's broker without a server: a file is never seen half-written."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest
from kombu import Connection, Exchange, Queue

from example_project.configuration import FILESYSTEM_TRANSPORT


@pytest.fixture
def channel(tmp_path: Path):
    options = {
        "data_folder_in": str(tmp_path),
        "data_folder_out": str(tmp_path),
        "control_folder": str(tmp_path / "control"),
    }
    with Connection(
        "filesystem://", transport=FILESYSTEM_TRANSPORT, transport_options=options
    ) as connection:
        yield connection.channel()


def test_a_message_is_there_when_all_of_it_is(channel, monkeypatch):
    rename = Path.rename

    def look_and_rename(file: Path, target: Path) -> Path:
        with pytest.raises(queue.Empty):
            channel._get("letters")
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", look_and_rename)
    channel._put("letters", {"body": "hello"})

    assert channel._size("letters") == 1
    assert channel._get("letters") == {"body": "hello"}


def test_messages_come_out_in_the_order_of_their_putting(channel, monkeypatch):
    moments = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    for number in range(3):
        channel._put("letters", number)
    assert [channel._get("letters") for _ in range(3)] == [0, 1, 2]


def test_a_binding_is_added_once_and_found(channel):
    exchange = Exchange("post", type="direct")
    for name in ("letters", "parcels", "letters"):
        Queue(name, exchange, routing_key=name)(channel).declare()
    bound = {(binding.routing_key, binding.queue) for binding in channel.get_table("post")}
    assert bound == {("letters", "letters"), ("parcels", "parcels")}
    assert len(channel.get_table("post")) == 2
