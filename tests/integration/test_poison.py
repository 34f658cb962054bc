"""What becomes of messages that no worker can run, and of the jobs whose ids they name."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from celery import Task
from celery.utils.objects import Bunch
from kombu import Queue
from kombu.message import Message
from sqlalchemy.exc import OperationalError

from celery_outbox import NotReplayable, Outbox
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.execute.foreign import Foreign
from celery_outbox.execute.outside import end_foreign
from celery_outbox.execute.payload import decode_call
from celery_outbox.execute.poison import Handlers, warn_without_dead_letters
from celery_outbox.execute.steps import _requests
from tests.factories import Database, add_task, make_app

EMPTY = b"[[], {}, {}]"


class Channel:
    """A channel that notes what happens to messages."""

    no_ack_consumers: Any = None

    def __init__(self) -> None:
        self.done: list[tuple[str, Any]] = []

    def basic_ack(self, tag: Any, multiple: bool = False) -> None:
        self.done.append(("ack", tag))

    def basic_reject(self, tag: Any, requeue: bool) -> None:
        self.done.append(("requeue" if requeue else "reject", tag))


class Timer:
    """A timer whose time comes when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, Any, tuple[Any, ...]]] = []

    def call_after(self, seconds: float, call: Any, arguments: tuple[Any, ...]) -> None:
        self.waiting.append((seconds, call, arguments))

    def tick(self) -> float:
        """Let the time of the oldest entry come; return how long it had to wait."""
        seconds, call, arguments = self.waiting.pop(0)
        call(*arguments)
        return seconds


class Consumer:
    """Of Celery's consumer what the handlers use."""

    connection_errors = (ConnectionError,)
    channel_errors = (LookupError,)
    event_dispatcher = None
    task_consumer = None

    def __init__(self, outbox: Outbox) -> None:
        self.app = outbox.app
        self.strategies = dict.fromkeys(self.app.tasks)
        self.timer = Timer()
        self.received: list[Message] = []
        self.trouble: Exception | None = None
        self.on_unknown_task: Any = None

    def create_task_handler(self) -> Any:
        """Celery's handler, as far as it matters."""

        def receive(message: Message) -> None:
            self.received.append(message)
            if self.trouble is not None:
                raise self.trouble
            if message.headers.get("task", "shop.gone") not in self.strategies:
                self.on_unknown_task(None, message, KeyError())

        return receive

    def call_soon(self, call: Any, *arguments: Any) -> None:
        """Celery calls in its loop, the test at once."""
        call(*arguments)


@pytest.fixture
def consumer(outbox: Outbox) -> Consumer:
    """A consumer with the handlers in it; its app has the task shop.export."""
    add_task(outbox.app)
    made = Consumer(outbox)
    Handlers(made).install()
    return made


def message(job_id: Any = "job-1", task: Any = "shop.export", **values: Any) -> Message:
    """Return a message as a broker delivers it."""
    headers = {"id": job_id, "task": task, **values.pop("headers", {})}
    info = {"exchange": "", "routing_key": "celery", "redelivered": values.pop("again", False)}
    return Message(
        channel=Channel(),
        delivery_tag=1,
        delivery_info=info,
        headers=headers,
        **{
            "body": EMPTY,
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "accept": {"application/json"},
            **values,
        },
    )


def claim_check(job_id: str = "job-1", task: str = "shop.export", **values: Any) -> Message:
    """Return the message of a recorded job."""
    headers = {"outbox_version": 1, **values.pop("headers", {})}
    return message(job_id, task, headers=headers, **values)


def bad(job_id: Any = "job-1", **values: Any) -> Message:
    """Return a message that no worker can run, of a client without the outbox."""
    return message(job_id, headers={"eta": "soon"}, **values)


def deliver(consumer: Consumer, *messages: Message) -> list[str]:
    """Deliver messages to the worker; return what it told the broker of each."""
    receive = consumer.create_task_handler()
    for each in messages:
        receive(each)
    return [what for each in messages for what, _ in each.channel.done]


def asides(outbox: Outbox) -> list[str]:
    """Return the ids of quarantined messages that have an id of their own."""
    found = outbox.control.quarantined()
    return [entry.id for entry in found if entry.id.startswith("invalid-")]


def test_a_good_message_is_celerys(consumer, recorded):
    good = message()
    assert deliver(consumer, good) == []
    assert (consumer.received, recorded.counts()) == ([good], (0, 0, 0))


def test_a_message_that_cannot_run_is_a_quarantined_job_with_all_it_had(consumer, recorded):
    assert deliver(consumer, bad(body=b'[["secret"], {}, {}]')) == ["reject"]
    job = recorded.job("job-1")
    assert (job.state, job.reason, job.source) == ("quarantined", "malformed", "broker")
    assert (job.error_code, job.task, job.queue) == ("malformed:eta", "shop.export", "celery")
    assert job.body == b'[["secret"], {}, {}]'
    assert job.envelope.headers["eta"] == "soon"
    assert recorded.events("job-1") == ["quarantined"]
    assert [row.kind for row in recorded.messages("job-1")] == ["quarantine"]
    assert consumer.received == []


def test_a_message_that_is_delivered_again_changes_nothing(consumer, outbox, recorded):
    again = bad(again=True)
    again.headers["redelivered"] = True
    again.headers["x-delivery-count"] = 1
    assert deliver(consumer, bad(), again) == ["reject", "reject"]
    assert (recorded.job("job-1").deliveries, asides(outbox)) == (2, [])
    assert len(recorded.messages("job-1")) == 1
    assert recorded.events("job-1") == ["quarantined", "duplicate"]


def test_without_a_usable_id_it_is_kept_once_however_often_it_is_delivered(
    consumer, outbox, recorded
):
    assert deliver(consumer, bad(None), bad(None, again=True), bad(5)) == ["reject"] * 3
    assert len(asides(outbox)) == 2
    assert recorded.counts()[:2] == (2, 2)


def test_two_messages_with_one_id_are_both_kept(consumer, outbox, recorded):
    deliver(consumer, bad(body=b"[[1], {}, {}]"), bad(body=b"[[2], {}, {}]"))
    [other] = asides(outbox)
    assert recorded.job("job-1").body == b"[[1], {}, {}]"
    assert recorded.job(other).body == b"[[2], {}, {}]"
    assert recorded.job(other).envelope.headers["id"] == "job-1"
    assert recorded.events("job-1") == ["quarantined", "mismatch"]


@pytest.mark.parametrize("state", [state for state in State if state is not State.RELAYED])
def test_a_job_is_not_disturbed_by_another_message_with_its_id(consumer, outbox, recorded, state):
    before = recorded.put(state, job_id="job-1")
    pending = recorded.messages("job-1")
    assert deliver(consumer, bad(), bad(again=True)) == ["reject", "reject"]
    after = recorded.job("job-1")
    for name in ("state", "body", "reason", "lease_token", "leased_until", "result", "attempt"):
        assert getattr(after, name) == getattr(before, name)
    assert recorded.messages("job-1") == pending
    assert recorded.events("job-1")[-1] == "mismatch"
    assert recorded.events("job-1").count("mismatch") == 1
    [other] = asides(outbox)
    assert recorded.job(other).reason == "malformed"
    assert [row.kind for row in recorded.messages(other)] == ["quarantine"]


@pytest.mark.parametrize("state", [State.QUEUED, State.RETRYING])
def test_a_job_that_waits_for_its_unusable_message_is_quarantined(
    consumer, outbox, recorded, state
):
    recorded.put(state, job_id="job-1")
    assert deliver(consumer, claim_check(body=b"no json")) == ["reject"]
    job = recorded.job("job-1")
    assert (job.state, job.reason, job.body) == ("quarantined", "undecodable", EMPTY)
    assert asides(outbox) == []


@pytest.mark.parametrize("state", [State.RUNNING, State.SUCCEEDED, State.CANCELLED])
def test_an_unknown_task_is_a_duplicate_when_its_job_does_not_wait(
    consumer, outbox, recorded, state
):
    recorded.put(state, job_id="job-1", task="shop.gone")
    assert deliver(consumer, claim_check(task="shop.gone")) == ["ack"]
    assert recorded.job("job-1").state is state
    assert recorded.events("job-1")[-1] == "duplicate"
    assert outbox.control.quarantined() == []


def test_a_quarantined_unknown_task_is_rejected_again_when_it_may_not_have_been(
    consumer, outbox, recorded
):
    outbox.config.__dict__["dead_letter"] = "broker"
    recorded.put(State.QUEUED, job_id="job-1", task="shop.gone")
    first, copy = claim_check(task="shop.gone"), claim_check(task="shop.gone")
    again = claim_check(task="shop.gone", again=True)
    assert deliver(consumer, first, copy, again) == ["reject", "ack", "reject"]


def test_headers_that_json_cannot_hold_are_kept(consumer, recorded):
    exotic = bad()
    exotic.headers |= {
        "raw": b"\xff\x00",
        "view": memoryview(b"\x01"),
        "when": datetime(2026, 1, 31, tzinfo=timezone.utc),
        "much": Decimal("1.5"),
        "nul": "a\x00b",
        "half": "a\ud800b",
        "table": {b"\xff": [1, {"in": (2, b"\xfe")}]},
        "marked": {"__type__": "nobody", "__value__": 1},
        "object": object,
        5: "number",
    }
    assert deliver(consumer, exotic) == ["reject"]
    kept = recorded.job("job-1").envelope.headers
    assert (kept["raw"], kept["much"], kept["nul"]) == (b"\xff\x00", Decimal("1.5"), "a\x00b")
    assert kept["half"] == "a\ud800b"
    assert kept["table"][str(b"\xff")] == [1, {"in": [2, b"\xfe"]}]


def test_a_message_stays_while_the_database_is_away(consumer, outbox, recorded, monkeypatch):
    def away(work: Any) -> Any:
        raise OperationalError("insert", {}, OSError("away"))

    with monkeypatch.context() as patch:
        patch.setattr(outbox.database, "write", away)
        waiting = bad()
        assert deliver(consumer, waiting) == []
        pauses = [consumer.timer.tick() for _ in range(10)]
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < 1 < pauses[-1] <= 5
    assert (waiting.channel.done, recorded.counts()[0]) == ([], 0)
    consumer.timer.tick()
    assert (waiting.channel.done, consumer.timer.waiting) == ([("reject", 1)], [])
    assert recorded.job("job-1").state == "quarantined"


def test_what_celery_raises_over_a_message_is_kept_too(consumer, recorded):
    consumer.trouble = TypeError("unhashable")
    assert deliver(consumer, message()) == ["reject"]
    job = recorded.job("job-1")
    assert (job.reason, job.error_code) == ("malformed", "TypeError")


@pytest.mark.parametrize("trouble", [ConnectionError(), KeyError()])
def test_trouble_with_the_broker_is_celerys(consumer, recorded, trouble):
    consumer.trouble = trouble
    with pytest.raises(type(trouble)):
        deliver(consumer, message())
    assert recorded.counts()[0] == 0


def test_what_came_without_arguments_or_task_cannot_be_replayed(consumer, outbox, recorded):
    deliver(consumer, claim_check("lost", headers={"eta": "soon"}), message("none", task=5))
    for job_id, problem in (("lost", "never recorded"), ("none", "names no task")):
        with pytest.raises(NotReplayable, match=problem):
            outbox.control.replay(job_id)
        assert recorded.job(job_id).state == "quarantined"


@pytest.mark.parametrize("job_id", ["job-1", None])
def test_a_message_can_be_replayed_when_the_cause_is_gone(consumer, outbox, recorded, job_id):
    deliver(consumer, message(job_id, body=b"[[1], {}, {}]", accept={"application/x-yaml"}))
    [entry] = outbox.control.quarantined()
    outbox.control.replay(entry.id)
    job = recorded.job(entry.id)
    assert (job.state, job.body) == ("queued", b"[[1], {}, {}]")
    assert [row.kind for row in recorded.messages(entry.id)] == ["quarantine", "task"]


def test_a_task_without_the_outbox_gets_the_whole_message_again(consumer, outbox, recorded):
    deliver(consumer, message(task="shop.plain"))
    assert not recorded.job("job-1").relay
    add_plain(outbox)
    outbox.control.replay("job-1")
    assert recorded.job("job-1").relay


def test_a_message_for_a_task_without_the_outbox_is_kept_for_it(consumer, outbox, recorded):
    add_plain(outbox)
    consumer.strategies["shop.plain"] = None
    deliver(consumer, message(task="shop.plain", body=b"5"))
    job = recorded.job("job-1")
    assert (job.task, job.reason, job.relay) == ("shop.plain", "malformed", True)


def add_plain(outbox: Outbox) -> None:
    """Register a task without the outbox."""
    add_task(outbox.app, name="shop.plain", base=Task)


def test_a_job_that_appears_meanwhile_is_not_taken_for_the_message(outbox, recorded: Database):
    foreign = Foreign.of(bad(), "celery")
    kept_id, _ = end_foreign(outbox.guard, foreign, Reason.MALFORMED, "malformed:eta")
    recorded.put(State.QUEUED, job_id="job-2")
    other = Foreign.of(bad("job-2"), "celery")
    other_id, keeps = end_foreign(outbox.guard, other, Reason.MALFORMED, "malformed:eta")
    assert (kept_id, other_id, keeps) == ("job-1", other.own_id, True)
    assert recorded.job("job-2").state == "queued"


def test_a_message_of_the_first_protocol_is_replayed_as_a_job(consumer, outbox, recorded):
    body = {"id": "job-1", "task": "shop.gone", "args": [1], "kwargs": {"a": 2}}
    old = message(body=json.dumps(body).encode())
    old.headers.clear()
    deliver(consumer, old)
    call = decode_call(outbox.app, recorded.job("job-1"))
    assert (call.args, call.kwargs) == ([1], {"a": 2})


@pytest.mark.parametrize(
    ("setting", "broker", "warned"),
    [
        ("auto", "amqp://localhost", ["plain", "theirs"]),
        ("outbox", "amqp://localhost", ["plain", "theirs"]),
        ("broker", "amqp://localhost", []),
        ("auto", "redis://localhost", []),
    ],
)
def test_a_worker_warns_of_queues_without_dead_letters(caplog, setting, broker, warned):
    app = make_app(broker_url=broker, outbox_dead_letter=setting)
    outbox = Outbox(app)
    theirs = Queue("theirs", queue_arguments={"x-dead-letter-exchange": "their.dead"})
    app.conf.task_queues = [outbox.queue("ours"), Queue("plain"), theirs]
    with caplog.at_level("WARNING", logger="celery_outbox"):
        warn_without_dead_letters(app)
    assert [record.outbox_queue for record in caplog.records] == warned
    for record in caplog.records:
        assert record.outbox_event == "outbox.queue_without_dead_letters"
        assert f"outbox.queue({record.outbox_queue!r})" in record.getMessage()


def test_the_heartbeat_looks_for_ids_that_a_job_can_have():
    requests = {Bunch(id=each) for each in ("job-1", 5, None, "nul\x00", "half\ud800")}
    assert _requests(requests) == {"job-1"}
