"""Messages that no worker can run, one of each kind."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

from amqp.basic_message import Message as AmqpMessage
from celery import Celery

#: The body of a call without arguments.
EMPTY = b"[[], {}, {}]"
JSON = "application/json"
PICKLE = "application/x-python-serialize"
ADD = "shop.add"


@dataclass(frozen=True)
class Poison:
    """A message, and what becomes of it.

    :param name: names the kind, and is the message's id unless ``headers`` say otherwise.
    :param reason: the reason in quarantine.
    :param error: the error code, where the test is to look at it.
    :param headers: on top of those of an ordinary call; ``None`` takes one away.
    :param has_id: the job has the id that the message names.
    :param task: the task that the job has.
    :param kept: the body that the job keeps, where it is not what was sent.
    """

    name: str
    reason: str
    error: str | None = None
    body: bytes = EMPTY
    content_type: str = JSON
    encoding: str = "utf-8"
    headers: dict[str, Any] = field(default_factory=dict)
    has_id: bool = True
    task: str = ADD
    kept: bytes | None = None
    properties: dict[str, Any] = field(default_factory=dict)

    @property
    def all_headers(self) -> dict[str, Any]:
        """The headers as they are sent."""
        merged = {"id": self.name, "task": ADD, "lang": "py", **self.headers}
        return {name: value for name, value in merged.items() if value is not None}


def malformed(name: str, what: str | None = None, **values: Any) -> Poison:
    """A message that has not the form of a task message."""
    return Poison(name, "malformed", f"malformed:{what or name}", **values)


def header(name: str, value: Any, what: str | None = None, **values: Any) -> Poison:
    """A message with one wrong header."""
    title = what or f"{name}-{type(value).__name__}"
    return malformed(title, name, headers={name: value}, **values)


def undecodable(name: str, **values: Any) -> Poison:
    """A message whose body cannot be read."""
    return Poison(name, "undecodable", **values)


#: Nothing of an ordinary call's headers.
BARE: dict[str, Any] = {"id": None, "task": None, "lang": None}


def first_protocol(**values: Any) -> bytes:
    """The body of a message of Celery's first protocol."""
    return json.dumps({"task": ADD, "args": [1, 2], "kwargs": {}, **values}).encode()


KINDS = [
    # -- bodies
    undecodable("not-json", body=b"{'no json"),
    undecodable("not-utf8", body=b"\xff\xfe\x00"),
    undecodable(
        "disallowed", error="kombu.exceptions.ContentDisallowed", body=b"cos\n", content_type=PICKLE
    ),
    undecodable("wrong-compression", headers={"compression": "application/x-gzip"}),
    undecodable("unknown-compression", headers={"compression": "shop/zip"}),
    undecodable("unknown-charset", content_type="application/data", encoding="klingon"),
    malformed("no-body", "body", body=b""),
    malformed("null-body", "body", body=b"null"),
    malformed("number-body", "body", body=b"5"),
    malformed("text-body", "body", body=b'"abc"'),
    malformed("empty-list-body", "body", body=b"[]"),
    malformed("short-body", "body", body=b"[[], {}]"),
    malformed("embed-list", "body", body=b"[[], {}, [1]]"),
    malformed("args-number", "args", body=b"[5, {}, {}]"),
    malformed("kwargs-list", "kwargs", body=b"[[], [1], {}]"),
    malformed("callbacks-number", "callbacks", body=b'[[], {}, {"callbacks": 5}]'),
    malformed("errbacks-texts", "errbacks", body=b'[[], {}, {"errbacks": ["a"]}]'),
    malformed("chain-table", "chain", body=b'[[], {}, {"chain": {"a": 1}}]'),
    malformed("chord-number", "chord", body=b'[[], {}, {"chord": 5}]'),
    malformed("plain-text", "body", body=b"hello", content_type="application/data"),
    malformed(
        "squeezed",
        "body",
        body=zlib.compress(b"[1]"),
        headers={"compression": "application/x-gzip"},
        kept=b"[1]",
    ),
    # -- ids
    header("id", None, "without-id", has_id=False),
    header("id", 5, has_id=False),
    header("id", ["list"], has_id=False),
    header("id", {"a": 1}, has_id=False),
    header("id", "", "empty-id", has_id=False),
    header("id", "x" * 300, "long-id", has_id=False),
    header("id", "nul\x00", "nul-id", has_id=False),
    header("id", "half\ud800", "surrogate-id", has_id=False),
    # -- tasks
    header("task", 5, task="(none)"),
    header("task", ["shop.add"], task="(none)"),
    header("task", {"shop.add": 1}, task="(none)"),
    header("task", "", "empty-task", task="(none)"),
    Poison("unknown", "unknown_task", headers={"task": "shop.gone"}, task="shop.gone"),
    Poison("long-task", "unknown_task", headers={"task": "x" * 300}, task="(none)"),
    Poison("nul-task", "unknown_task", headers={"task": "x\x00y"}, task="(none)"),
    Poison("half-task", "unknown_task", headers={"task": "x\ud800y"}, task="(none)"),
    Poison(
        "unknown-without-id",
        "unknown_task",
        headers={"task": "shop.gone", "id": None},
        task="shop.gone",
        has_id=False,
    ),
    Poison(
        "unknown-unreadable",
        "unknown_task",
        headers={"task": "shop.gone"},
        task="shop.gone",
        body=b"\xff",
        content_type=PICKLE,
    ),
    # -- other headers
    header("eta", "soon"),
    header("eta", 5),
    header("eta", [1]),
    header("eta", "", "empty-eta"),
    header("eta", "9999-12-31T23:59:59-12:00", "endless-eta"),
    header("expires", "later"),
    header("expires", {"a": 1}),
    header("expires", 0, "zero-expires"),
    header("expires", "0001-01-01T00:00:00+14:00", "ancient-expires"),
    header("retries", "many"),
    header("retries", -1),
    header("retries", 2**40, "endless-retries"),
    header("timelimit", "long"),
    header("timelimit", 5),
    header("timelimit", [1], "short-timelimit"),
    header("timelimit", ["a", "b"], "text-timelimit"),
    header("timelimit", [None, -5], "negative-timelimit"),
    header("shadow", {"a": 1}),
    header("shadow", [1]),
    header("stamped_headers", 5),
    header("stamped_headers", [{"a": 1}], "table-stamped_headers"),
    header("stamps", "text"),
    # -- what AMQP can carry and JSON cannot
    malformed(
        "exotic",
        "timelimit",
        headers={
            "timelimit": "long",
            "when": datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc),
            "much": Decimal("1.5"),
            "raw": b"\xff\x00",
            "nul": "a\x00b",
            "half": "a\ud800b",
            "table": {"in": {"in": [1, {"in": b"\xfe"}]}},
        },
    ),
    # -- Celery's first protocol
    malformed("nothing", "task", headers=BARE, has_id=False, task="(none)"),
    undecodable("no-task-no-json", body=b"{", headers=BARE, has_id=False, task="(none)"),
    malformed("list", "task", body=b"[1, 2]", headers=BARE, has_id=False, task="(none)"),
    malformed(
        "first-task-list",
        "task",
        body=first_protocol(task=["x"], id="first-task-list"),
        headers=BARE,
        task="(none)",
    ),
    malformed("first-without-id", "id", body=first_protocol(), headers=BARE, has_id=False),
    malformed("first-args", "args", body=first_protocol(id="first-args", args=5), headers=BARE),
    malformed(
        "first-kwargs", "kwargs", body=first_protocol(id="first-kwargs", kwargs=[1]), headers=BARE
    ),
    malformed("first-eta", "eta", body=first_protocol(id="first-eta", eta="x"), headers=BARE),
    Poison(
        "first-unknown",
        "unknown_task",
        body=first_protocol(id="first-unknown", task="shop.gone"),
        headers=BARE,
        task="shop.gone",
    ),
    # -- a task without the outbox
    undecodable("plain-not-json", body=b"{", headers={"task": "shop.bare"}, task="shop.bare"),
    undecodable(
        "plain-disallowed", content_type=PICKLE, headers={"task": "shop.bare"}, task="shop.bare"
    ),
    malformed("plain-body", "body", body=b"5", headers={"task": "shop.bare"}, task="shop.bare"),
    malformed("plain-eta", "eta", headers={"task": "shop.bare", "eta": "soon"}, task="shop.bare"),
    malformed(
        "plain-without-id",
        "id",
        headers={"task": "shop.bare", "id": None},
        task="shop.bare",
        has_id=False,
    ),
]


def send(app: Celery, queue: str, *messages: Poison) -> None:
    """Put messages into a queue as they are."""
    with app.connection_for_write() as connection:
        app.amqp.queues[queue](connection.default_channel).declare()
        producer = connection.Producer()
        for each in messages:
            producer.publish(
                each.body,
                exchange="",
                routing_key=queue,
                content_type=each.content_type,
                content_encoding=each.encoding,
                headers=each.all_headers,
                **each.properties,
            )


class Milliseconds(AmqpMessage):
    """A message whose timestamp header has milliseconds where AMQP has seconds."""

    def _serialize_properties(self) -> bytes:
        seconds = struct.pack(">cQ", b"T", 1_700_000_000)
        sent = super()._serialize_properties()
        assert seconds in sent
        return sent.replace(seconds, struct.pack(">cQ", b"T", 1_700_000_000_000))


def send_unreadable(app: Celery, queue: str) -> int:
    """Put messages into a queue that the transport itself cannot read; return how many."""
    with app.connection_for_write() as connection, connection.channel() as channel:
        app.amqp.queues[queue](channel).declare()
        if connection.transport.driver_type == "amqp":
            when = datetime.fromtimestamp(1_700_000_000, timezone.utc)
            messages = [
                AmqpMessage(b"-", content_type=b"\xff\xfe"),
                AmqpMessage(b"", correlation_id=b"\xff"),
                Milliseconds(b"-", application_headers={"id": "a", "sent": when}),
            ]
            for message in messages:
                channel.basic_publish(message, exchange="", routing_key=queue)
            return len(messages)
        if connection.transport.driver_type == "redis":
            items = unreadable_items()
            for item in items:
                channel.client.lpush(queue, item)
            return len(items)
    return 0


def unreadable_items() -> list[str | bytes]:
    """What somebody may have pushed into a Redis list, and is no message of kombu's."""
    info = {"exchange": "", "routing_key": "celery"}
    properties = {"delivery_tag": "a", "delivery_info": info, "body_encoding": "base64"}
    good = {"body": "W10=", "headers": {}, "properties": properties}
    tables = [
        {"a": 1},
        [1],
        5,
        {**good, "headers": [1]},
        {**good, "headers": {"a": {"__type__": "nobody", "__value__": 1}}},
        {**good, "body": "a"},
        {**good, "properties": {**properties, "body_encoding": "klingon"}},
        {**good, "properties": {**properties, "delivery_tag": None}},
        {**good, "properties": {**properties, "delivery_info": [1]}},
        {**good, "properties": {**properties, "delivery_info": {}}},
        {**good, "properties": [1]},
    ]
    return ["hello", b"\xff\x00", *(json.dumps(table) for table in tables)]
