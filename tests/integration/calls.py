"""Generates calls: every option of ``apply_async``, and the settings that shape a message."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from celery import Celery, signals
from celery.canvas import StampingVisitor
from hypothesis import strategies as st
from kombu import Exchange, Queue, binding

#: The moment of every call, by the clocks of both apps.
NOW = datetime.now(timezone.utc).replace(microsecond=0)
TASK = "shop.export"


class Stamps(StampingVisitor):
    """Stamps what it visits, with headers of both kinds."""

    def on_signature(self, sig: Any, **headers: Any) -> dict[str, Any]:
        """Return a stamp that the worker gets as such, and a header beside."""
        return {"tenant": "7", "trace": [1, 2], "stamped_headers": ["tenant"]}


@dataclass
class Call:
    """A call that can be made in either app, with objects of its own each time."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    #: Names of options whose values stand for signatures.
    links: dict[str, Any] = field(default_factory=dict)
    visitor: bool = False
    receiver: str | None = None

    def make(self, app: Celery) -> Any:
        """Make the call."""
        task = app.tasks[TASK]
        args, kwargs, options = deepcopy((self.args, self.kwargs, self.options))
        for name, value in self.links.items():
            options[name] = self._signatures(app, value)
        options["task_id"] = "job-1"
        receiver = RECEIVERS[self.receiver] if self.receiver is not None else None
        if receiver is not None:
            # Celery 5.4 looks once, at an app's first call, who the receivers are.
            app.amqp.__dict__.pop("send_task_message", None)
            signals.before_task_publish.connect(receiver, sender=TASK)
        try:
            if not self.visitor:
                return task.apply_async(args, kwargs, **options)
            signature = task.signature(args, kwargs, **options)
            signature.stamp(Stamps(), append_stamps=False, colour="red")
            return signature.apply_async()
        finally:
            if receiver is not None:
                signals.before_task_publish.disconnect(receiver, sender=TASK)

    def _signatures(self, app: Celery, value: Any) -> Any:
        if isinstance(value, list):
            return [self._signatures(app, each) for each in value]
        return app.signature("shop.notify", args=(value,), immutable=value % 2 == 0)


# -- receivers of before_task_publish ------------------------------------------------------


def _add_header(headers: Any, **_: Any) -> None:
    headers["traceparent"] = "00-1-2-01"
    headers["shadow"] = "renamed"


def _add_argument(body: Any, **_: Any) -> None:
    body[1]["added"] = [1]
    body[2]["callbacks"] = None


def _set_properties(properties: Any, **_: Any) -> None:
    properties |= {"priority": 3, "app_id": "shop", "expiration": 7200}


def _delay(headers: Any, **_: Any) -> None:
    headers["eta"] = (NOW + timedelta(hours=2)).isoformat()


def _expire(headers: Any, **_: Any) -> None:
    headers["expires"] = (NOW + timedelta(hours=2)).isoformat()


def _declare(declare: Any, **_: Any) -> None:
    if declare is not None:
        declare.append(Queue("audit", Exchange("audit", type="fanout"), expires=60))


RECEIVERS: dict[str, Callable[..., None]] = {
    "header": _add_header,
    "argument": _add_argument,
    "properties": _set_properties,
    "eta": _delay,
    "expires": _expire,
    "declare": _declare,
}

# -- values --------------------------------------------------------------------------------

_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
_SMALL = st.integers(min_value=-(2**31), max_value=2**31)
_PLAIN = st.none() | st.booleans() | _SMALL | _TEXT | st.floats(allow_nan=False, width=32)
_TYPED = st.sampled_from(
    [
        Decimal("1.10"),
        UUID(int=7),
        date(2026, 1, 31),
        time(1, 2, 3),
        datetime(2026, 1, 31, 12),
        datetime(2026, 1, 31, 12, tzinfo=timezone.utc),
        b"bytes",
        b"\xff\x00",
        "a\x00b",
        2**70,
    ]
)
VALUES = st.recursive(
    _PLAIN | _TYPED,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
    max_leaves=4,
)
_HEADERS = st.dictionaries(
    st.sampled_from(["tenant", "traceparent", "x-nested", "baggage"]),
    st.recursive(
        _TEXT | _SMALL | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_TEXT, inner, max_size=2),
        max_leaves=3,
    ),
    max_size=2,
)
_AHEAD = st.integers(min_value=3600, max_value=10**6)


def _moments(seconds: int) -> st.SearchStrategy[Any]:
    """The ways to say a time."""
    moment = NOW + timedelta(seconds=seconds)
    berlin = moment.astimezone(ZoneInfo("Europe/Berlin"))
    return st.sampled_from(
        [
            moment,
            moment.replace(microsecond=123456),
            berlin,
            moment.replace(tzinfo=None),
            moment.isoformat(),
            berlin.isoformat(),
            moment.replace(tzinfo=None).isoformat(),
            moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        ]
    )


_TIMES = _AHEAD.flatmap(_moments) | st.just(-3600).flatmap(_moments)
_EXPIRES = _TIMES | _AHEAD | _AHEAD.map(float) | st.sampled_from([-5, -0.5])

QUEUES = [
    "reports",
    Queue("tenant", Exchange("tenants", type="topic"), "tenant.7", max_priority=9),
    Queue("short", Exchange("short", durable=False, auto_delete=True), "k", expires=60),
    Queue("full", Exchange("full", arguments={"alternate-exchange": "else"}), "k", max_length=9),
    Queue("old", Exchange("old", delivery_mode=1), "k", message_ttl=30, max_length_bytes=10**6),
    Queue("arguments", Exchange("a"), "k", queue_arguments={"x-queue-type": "quorum"}),
    Queue("bound", Exchange("bound"), "k", binding_arguments={"x-match": "all"}),
    Queue("bare", durable=False, auto_delete=True),
    Queue("there", Exchange("there", no_declare=True), "k", no_declare=True),
    Queue("many", [binding(Exchange("one", type="topic"), "a.#"), binding(Exchange("two"), "b")]),
]

_ONE_OR_MORE = st.integers(0, 9) | st.lists(st.integers(0, 9), min_size=1, max_size=2)

_ROUTING = st.one_of(
    st.just({}),
    st.sampled_from(QUEUES).map(lambda queue: {"queue": queue}),
    st.just({"queue": "reports", "routing_key": "some.key"}),
    st.just({"exchange": "events", "routing_key": "order.created"}),
    st.just({"exchange": "events", "routing_key": "order.paid", "exchange_type": "topic"}),
    st.just({"exchange": Exchange("events", type="topic"), "routing_key": "order.created"}),
    st.just({"exchange": Exchange("plain", delivery_mode=1), "routing_key": "some.key"}),
    st.just({"routing_key": "some.key"}),
)

_OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(0, 9),
        "serializer": st.sampled_from(["json", "pickle", "yaml", "msgpack"]),
        "compression": st.sampled_from(["gzip", "zlib", "bzip2", "application/x-gzip"]),
        "headers": _HEADERS,
        "shadow": _TEXT,
        "expires": _EXPIRES,
        "eta": _TIMES,
        "countdown": st.just(0) | _AHEAD | _AHEAD.map(float) | st.just(-60),
        "group_id": st.just("group-1"),
        "group_index": st.integers(0, 9),
        "time_limit": st.integers(60, 90),
        "soft_time_limit": st.integers(1, 50),
        "ignore_result": st.booleans(),
        "reply_to": st.just("answers"),
        "root_id": st.just("root-1"),
        "parent_id": st.just("parent-1"),
        "replaced_task_nesting": st.integers(0, 3),
        "retries": st.integers(0, 3),
        "argsrepr": st.just("(shown)"),
        "kwargsrepr": st.just("{shown}"),
        "delivery_mode": st.sampled_from([1, 2, "transient", "persistent"]),
        "mandatory": st.booleans(),
        "add_to_parent": st.booleans(),
        "correlation_id": st.just("other-1"),
        "message_id": st.just("message-1"),
        "app_id": st.just("shop"),
        "user_id": st.just("guest"),
        "type": st.just("kind"),
        "timestamp": st.just(1_770_000_000),
        "expiration": st.sampled_from([3600, 7200.5]),
        "stamped_headers": st.just(["customer", "batch"]),
        "retry": st.booleans(),
        "retry_policy": st.just({"max_retries": 1}),
    },
)


def _whole(options: dict[str, Any], routing: dict[str, Any]) -> dict[str, Any]:
    if "stamped_headers" in options:
        options = {**options, "customer": "c-1", "batch": [1, 2]}
    return {**options, **routing}


CALLS = st.builds(
    Call,
    args=st.lists(VALUES, max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["period", "account"]), VALUES, max_size=2),
    options=st.builds(_whole, _OPTIONS, _ROUTING),
    links=st.fixed_dictionaries(
        {},
        optional={
            "link": _ONE_OR_MORE,
            "link_error": _ONE_OR_MORE,
            "chain": st.lists(st.integers(0, 9), min_size=1, max_size=2),
            "chord": st.integers(0, 9),
        },
    ),
    visitor=st.booleans(),
    receiver=st.none() | st.sampled_from(sorted(RECEIVERS)),
)

#: Settings of the app that shape a message.
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "task_serializer": st.sampled_from(["json", "pickle"]),
        "task_compression": st.just("gzip"),
        "task_routes": st.sampled_from(
            [
                {"shop.*": {"queue": "routed", "priority": 5}},
                {"shop.export": {"exchange": "events", "routing_key": "routed.key"}},
                ([("shop.*", {"queue": "routed", "delivery_mode": 1})],),
                (lambda name, args, kwargs, options, task=None, **_: {"queue": f"by-{name}"},),
            ]
        ),
        "task_annotations": st.sampled_from(
            [
                {"*": {"priority": 6}},
                {"shop.export": {"time_limit": 70, "serializer": "pickle", "expires": 7200}},
            ]
        ),
        "timezone": st.sampled_from(["Europe/Berlin", "America/New_York", "UTC"]),
        "enable_utc": st.booleans(),
        "task_send_sent_event": st.booleans(),
        "task_default_delivery_mode": st.sampled_from(["transient", "persistent"]),
        "task_default_queue": st.just("standard"),
        "task_default_priority": st.integers(0, 9),
        "task_queue_max_priority": st.just(9),
        "task_ignore_result": st.booleans(),
        "task_queues": st.just(
            [Queue("reports", Exchange("shop", type="topic"), "reports.#"), Queue("celery")]
        ),
        "task_default_exchange": st.just("standard-exchange"),
        "task_default_exchange_type": st.sampled_from(["direct", "topic"]),
        "task_default_routing_key": st.just("default.key"),
        "task_publish_retry": st.booleans(),
    },
)

#: Options of the task itself.
TASKS = st.fixed_dictionaries(
    {},
    optional={
        "priority": st.integers(0, 9),
        "serializer": st.sampled_from(["json", "pickle"]),
        "expires": st.just(7200),
        "time_limit": st.just(99),
        "soft_time_limit": st.just(55),
        "ignore_result": st.booleans(),
        "queue": st.just("of-the-task"),
        "compression": st.just("zlib"),
        "delivery_mode": st.just(1),
    },
)
