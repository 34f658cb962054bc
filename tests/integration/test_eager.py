"""Eager mode and other ways to call a body: what arrives is what arrives in a worker."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import celery
import pytest
from celery import chain
from pydantic import BaseModel
from sqlalchemy import Column, Integer, MetaData, String, Table, func, select
from sqlalchemy.orm import Session

from celery_outbox import Outbox, OutboxTask, UnserializableArgument
from celery_outbox.core.states import State
from tests.integration.delivering import add_task, deliver

#: What is tested does not depend on the database's kind.
pytestmark = pytest.mark.parametrize("installed_url", ["sqlite", "postgresql"], indirect=True)

ORDERS = Table(
    "orders", MetaData(), Column("id", Integer, primary_key=True), Column("x", String(9))
)

#: Arguments that JSON changes, or keeps.
ARGUMENTS: list[Any] = [(1, 2), {1: "one"}, Decimal("1.10"), b"x", {"nested": (None,)}]


@pytest.fixture
def orders(outbox: Outbox) -> Iterator[Table]:
    """A table of the application."""
    ORDERS.create(outbox.engine)
    yield ORDERS
    ORDERS.drop(outbox.engine)


def count(session: Session) -> int:
    return session.execute(select(func.count()).select_from(ORDERS)).scalar_one()


def test_arguments_arrive_eagerly_as_they_arrive_in_a_worker(outbox, recorded):
    seen: list[Any] = []
    task = add_task(outbox.app, lambda *args, **kwargs: seen.append((args, kwargs)))
    job_id = task.delay(*ARGUMENTS, period=("a", "b")).id
    assert deliver(task, job_id) == "SUCCESS"
    outbox.app.conf.task_always_eager = True
    task.delay(*ARGUMENTS, period=("a", "b"))
    assert seen[1] == seen[0]
    assert seen[0][0][0] == [1, 2]


def test_what_cannot_be_recorded_is_refused_eagerly_too(outbox):
    outbox.app.conf.task_always_eager = True
    task = add_task(outbox.app, lambda *args: None)
    with pytest.raises(UnserializableArgument, match="argument 1"):
        task.delay(1, object())


@pytest.mark.parametrize("how", ["use", "argument"])
def test_the_callers_transaction_is_open_after_an_eager_call(outbox, orders, how):
    outbox.app.conf.task_always_eager = True

    def write(task: Any, fail: bool) -> None:
        task.session.execute(orders.insert().values(x="body"))
        if fail:
            raise ValueError("after the write")

    task = add_task(outbox.app, write, bind=True, transactional=True)
    with Session(outbox.engine) as session, session.begin():
        session.execute(orders.insert().values(x="caller"))
        for fail in (False, True):
            if how == "use":
                with outbox.use(session):
                    result = task.delay(fail)
            else:
                result = task.apply_async((fail,), session=session)
            assert result.state == ("FAILURE" if fail else "SUCCESS")
            assert session.in_transaction()
        # What the body that failed wrote is undone, and nothing else.
        assert count(session) == 2
        session.rollback()
    with Session(outbox.engine) as session:
        assert count(session) == 0


def test_errors_of_eager_calls_propagate_as_configured(outbox):
    app = outbox.app
    app.conf.task_always_eager = True

    def fail() -> None:
        raise ValueError("bad")

    task = add_task(app, fail)
    assert isinstance(task.delay().result, ValueError)
    with pytest.raises(ValueError, match="bad"):
        task.apply(throw=True)
    app.conf.task_eager_propagates = True
    with pytest.raises(ValueError, match="bad"):
        task.delay()


def test_a_class_is_a_task_eagerly_and_in_a_worker(outbox, recorded):
    class Export(OutboxTask):
        name = "shop.export-class"

        def __init__(self) -> None:
            self.calls = 0

        def run(self, x: int) -> int:
            self.calls += 1
            return x * 2

    task = outbox.app.register_task(Export())
    assert task(2) == 4
    assert task.apply((2,)).get() == 4
    job_id = task.delay(2).id
    assert deliver(task, job_id) == "SUCCESS"
    assert outbox.job(job_id).state == "succeeded"
    assert task.calls == 3


def test_what_a_body_calls_is_in_the_trail_of_its_result(outbox, recorded):
    app = outbox.app
    app.conf.result_backend = "cache+memory://"
    child = add_task(app, lambda: None, name="shop.child")
    children = []

    def body() -> None:
        children.append(child.delay().id)
        child.apply_async(add_to_parent=False)

    job_id = add_task(app, body).delay().id
    assert deliver(app.tasks["shop.export"], job_id) == "SUCCESS"
    result = app.AsyncResult(job_id)
    assert [each.id for each in result.children] == children
    header = recorded.job(children[0]).envelope.headers
    assert (header["parent_id"], header["root_id"]) == (job_id, job_id)


def test_a_chains_result_knows_its_parents(outbox, recorded):
    task = add_task(outbox.app, lambda *args: None)
    last = chain(task.s(1), task.s(2), task.s(3)).delay()
    first = last.parent.parent
    assert first.parent is None
    assert recorded.job(first.id).state is State.QUEUED
    assert last.id != last.parent.id != first.id


if celery.VERSION >= (5, 5):

    class Order(BaseModel):
        id: int
        price: Decimal

    class Receipt(BaseModel):
        text: str

    def pay(order: Order, tip: int = 0) -> Receipt:
        return Receipt(text=f"{type(order).__name__} {order.price + tip}")

    #: Models are made of what was sent; since Celery 5.7 the models themselves can be sent.
    SENT = [{"id": 1, "price": "1.10"}]
    if celery.VERSION >= (5, 7):
        SENT.append(Order(id=1, price=Decimal("1.10")))

    @pytest.mark.parametrize("order", SENT, ids=lambda each: type(each).__name__)
    def test_a_pydantic_task_gets_models_and_stores_plain_data(outbox, recorded, order):
        pay.__name__ = "body"
        task = add_task(outbox.app, pay, pydantic=True)
        job_id = task.delay(order, tip=1).id
        assert deliver(task, job_id) == "SUCCESS"
        assert recorded.job(job_id).result == b'{"text": "Order 2.10"}'
        assert deliver(task, job_id) == "SUCCESS", "a duplicate gets the stored result"
        outbox.app.conf.task_always_eager = True
        assert task.delay(order, tip=1).get() == {"text": "Order 2.10"}

    def test_a_pydantic_task_refuses_what_is_no_model_for_good(outbox, recorded):
        task = add_task(outbox.app, pay, pydantic=True)
        job_id = task.delay({"id": "no number"}).id
        assert deliver(task, job_id) == "FAILURE"
        job = recorded.job(job_id)
        assert (job.state, job.reason) == (State.QUARANTINED, "permanent")
        assert job.error_code.endswith("ValidationError")
