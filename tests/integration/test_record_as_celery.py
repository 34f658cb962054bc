"""Beside where a call goes, it is Celery's own: signals, canvas, results, eager mode."""

from __future__ import annotations

import json
import socket

import pytest
from celery import chain, chord, group, signals
from celery.result import AsyncResult
from sqlalchemy.orm import Session

from celery_outbox.core.states import State
from tests.factories import Database, add_task, make_app, make_stock_app, open_outbox

NOTHING = (0, 0, 0)


def add(x: int, y: int = 0) -> int:
    return x + y


def fail(message: str) -> None:
    raise ValueError(message)


def refuse_connections(monkeypatch):
    """Make every connection that Python opens an error; the database driver has its own."""

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def no_network(monkeypatch):
    """Nobody opens a connection."""
    refuse_connections(monkeypatch)


@pytest.mark.parametrize(
    ("broker", "backend"),
    [
        ("amqp://127.0.0.1:1//", None),
        ("amqp://127.0.0.1:1//", "rpc://"),
        ("amqp://127.0.0.1:1//", "redis://127.0.0.1:1/0"),
        ("redis://127.0.0.1:1/0", "redis://127.0.0.1:1/0"),
        ("amqp://127.0.0.1:1//", "cache+memory://"),
        ("amqp://127.0.0.1:1//", "db+sqlite:////nowhere/at/all"),
    ],
)
def test_a_call_reaches_neither_broker_nor_result_backend(
    sqlite_installed_url, no_network, broker, backend
):
    settings = {"broker_url": broker, "result_backend": backend, "task_send_sent_event": True}
    with open_outbox(sqlite_installed_url, init=False, **settings) as outbox:
        task = add_task(outbox.app, add)
        ids = [task.delay(1).id, task.apply_async((1,), countdown=5, expires=60).id]
        ids.append(chain(task.s(1), task.s(2)).apply_async().parent.id)
        ids += [member.id for member in group(task.s(1), task.s(2)).apply_async()]
        ids += [member.id for member in chord([task.s(1), task.s(2)])(task.si(3)).parent]
        jobs = [Database(outbox.engine, outbox.tables).job(job_id) for job_id in ids]
    assert [job.state for job in jobs] == [State.QUEUED] * 7


@pytest.mark.parametrize(
    ("end", "counts"), [("commit", (1, 1, 1)), ("rollback", NOTHING)], ids=["commit", "rollback"]
)
def test_with_the_broker_away_a_transaction_leaves_one_job_and_one_message_or_nothing(
    installed_url, monkeypatch, end, counts
):
    with open_outbox(installed_url, init=False, broker_url="amqp://127.0.0.1:1//") as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        task = add_task(outbox.app, add)
        with Session(outbox.engine) as session:
            # The database's own connection is there.
            session.connection()
            refuse_connections(monkeypatch)
            with outbox.use(session):
                job_id = task.delay(1).id
            getattr(session, end)()
        monkeypatch.undo()
        assert recorded.counts() == counts
        assert [row.job_id for row in recorded.messages()] == [job_id] * counts[1]


@pytest.mark.parametrize("of_task", [False, True])
@pytest.mark.parametrize("of_call", [None, False, True])
def test_the_result_is_celerys_and_ignored_as_the_call_said(outbox, recorded, of_task, of_call):
    task = add_task(outbox.app, add, ignore_result=of_task)
    options = {} if of_call is None else {"ignore_result": of_call}
    result = task.apply_async((1,), **options)
    expected = of_task if of_call is None else of_call
    assert isinstance(result, AsyncResult)
    assert result.ignored is expected
    assert recorded.job(result.id).envelope.headers["ignore_result"] is expected


def test_the_rows_of_arguments_are_redacted_where_celery_would_show_them(outbox, recorded):
    task = add_task(outbox.app, add)
    headers = recorded.job(task.delay(31337).id).envelope.headers
    assert "31337" not in json.dumps(headers)
    shown = recorded.job(task.apply_async((31337,), argsrepr="(account,)").id).envelope.headers
    assert shown["argsrepr"] == "(account,)"


def test_signals_fire_as_in_celery(outbox, recorded):
    task = add_task(outbox.app, add, name="shop.signalled")
    seen = []

    def before(sender, headers, body, routing_key, **_):
        seen.append(("before", sender, headers["id"], list(body[0]), routing_key))
        headers["traceparent"] = "00-1-2-01"

    def after(sender, headers, body, routing_key, **_):
        seen.append(("after", sender, headers["id"], list(body[0]), routing_key))

    signals.before_task_publish.connect(before, sender=task.name)
    signals.after_task_publish.connect(after, sender=task.name)
    try:
        result = task.delay(1)
    finally:
        signals.before_task_publish.disconnect(before, sender=task.name)
        signals.after_task_publish.disconnect(after, sender=task.name)
    rest = ("shop.signalled", result.id, [1], "celery")
    assert seen == [("before", *rest), ("after", *rest)]
    assert recorded.job(result.id).envelope.headers["traceparent"] == "00-1-2-01"


@pytest.mark.parametrize("outbox_app", [True, False])
def test_direct_calls_apply_and_eager_mode_are_as_in_celery(outbox_app):
    app = (make_app if outbox_app else make_stock_app)(task_always_eager=True)
    task, failing = add_task(app, add), add_task(app, fail, name="shop.fail")
    assert task(1, y=2) == 3
    assert task.apply((1, 2)).get() == 3
    assert task.apply((1,), {"y": 2}, task_id="x").id == "x"
    assert task.delay(1, 2).get() == 3
    assert task.apply_async((1, 2), countdown=60, expires=90, priority=3).get() == 3
    assert chain(task.s(1), task.s(2)).delay().get() == 3
    assert group(task.s(1), task.s(2)).delay().get() == [1, 2]
    for result in (failing.delay("bad"), failing.apply(("bad",))):
        assert (result.state, type(result.result)) == ("FAILURE", ValueError)
    with pytest.raises(ValueError, match="bad"):
        failing("bad")


def test_an_eager_call_does_not_need_a_database():
    app = make_app(task_always_eager=True, task_eager_propagates=True)
    assert add_task(app, add).delay(1, 2).get() == 3


def test_a_body_that_is_called_directly_or_eagerly_may_ask_who_it_is():
    app = make_app(task_always_eager=True)
    task = add_task(app, who_am_i, bind=True)
    assert task.apply(task_id="export-42").get() == "export-42"
    assert task() is None


def who_am_i(self):
    return self.idempotency_key


def test_a_group_records_every_member(outbox, recorded):
    task = add_task(outbox.app, add)
    result = group(task.s(number) for number in range(3)).delay()
    assert recorded.counts() == (3, 3, 3)
    headers = [recorded.job(child.id).envelope.headers for child in result.children]
    assert {each["group"] for each in headers} == {result.id}
    assert [each["group_index"] for each in headers] == [0, 1, 2]


def test_a_chain_records_its_first_step_with_the_rest_in_its_body(outbox, recorded):
    task = add_task(outbox.app, add)
    result = chain(task.s(1), task.s(2), task.s(3)).delay()
    first = result.parent.parent
    assert recorded.counts() == (1, 1, 1)
    _, _, embed = json.loads(recorded.job(first.id).body)
    assert [step["args"] for step in embed["chain"]] == [[3], [2]]
    assert embed["chain"][0]["options"]["task_id"] == result.id


def test_a_chord_records_its_header_with_the_body_attached(outbox, recorded):
    outbox.app.conf.result_backend = "cache+memory://"
    task = add_task(outbox.app, add)
    result = chord([task.s(1), task.s(2)], task.s()).delay()
    assert recorded.counts() == (2, 2, 2)
    for child in result.parent.children:
        _, _, embed = json.loads(recorded.job(child.id).body)
        assert embed["chord"]["options"]["task_id"] == result.id


def test_a_canvas_belongs_to_the_callers_transaction(outbox, recorded):
    task = add_task(outbox.app, add)
    with outbox.engine.connect() as connection:
        with outbox.use(connection):
            group(task.s(1), task.s(2)).delay()
            chain(task.s(1), task.s(2)).delay()
        connection.rollback()
    assert recorded.counts() == NOTHING


def test_links_are_in_the_body(outbox, recorded):
    task = add_task(outbox.app, add)
    result = task.apply_async((1,), link=task.s(2), link_error=task.si(0))
    _, _, embed = json.loads(recorded.job(result.id).body)
    assert [each["args"] for each in embed["callbacks"]] == [[2]]
    assert [each["args"] for each in embed["errbacks"]] == [[0]]


def test_what_a_call_records_is_what_stock_celery_would_send(outbox, recorded):
    options = {"queue": "reports", "priority": 4, "expires": 60, "shadow": "sum", "time_limit": 9}
    options |= {"headers": {"tenant": "7"}, "task_id": "x", "argsrepr": "1", "kwargsrepr": "2"}
    stock = make_stock_app(broker_url="memory://")
    with stock.connection_for_write() as connection:
        add_task(stock, add).apply_async((1,), connection=connection, **options)
        queue = connection.SimpleQueue("reports")
        sent = queue.get(timeout=5)
        sent.ack()
        queue.close()
    add_task(outbox.app, add).apply_async((1,), **options)
    envelope = recorded.job("x").envelope
    # The moment of the call is another one.
    assert {**envelope.headers, "expires": 0} == {**sent.headers, "expires": 0}
    for name in ("correlation_id", "priority", "delivery_mode"):
        assert envelope.properties[name] == sent.properties[name]
    assert json.loads(recorded.job("x").body) == json.loads(sent.body)
