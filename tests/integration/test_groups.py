"""A group or chord that is called without a transaction is recorded in one of its own."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import _state, chain, chord, group
from sqlalchemy import Connection, event, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from celery_outbox import JobIdTaken, NoTransaction, Outbox, UnserializableArgument
from celery_outbox.record import batch
from celery_outbox.store import rerun
from tests.factories import Database, make_app, make_stock_app, open_outbox
from tests.integration.delivering import add_task, deliver
from tests.integration.test_chords import Shop

NOTHING = (0, 0, 0)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time for a task, too."""
    monkeypatch.setattr(batch, "PAUSE", 600.0)
    monkeypatch.setattr(batch, "LONGEST", 600.0)


@pytest.fixture
def shop(outbox: Outbox, recorded: Database) -> Shop:
    return Shop(outbox, recorded)


@contextmanager
def statements(outbox: Outbox) -> Iterator[list[str]]:
    """The statements that are sent in the block, and the commits."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    def commit(connection: Any) -> None:
        sent.append("COMMIT")

    event.listen(outbox.engine, "before_cursor_execute", note)
    event.listen(outbox.engine, "commit", commit)
    yield sent
    event.remove(outbox.engine, "before_cursor_execute", note)
    event.remove(outbox.engine, "commit", commit)


@contextmanager
def failing_once(monkeypatch: pytest.MonkeyPatch, when: str, lost: bool) -> Iterator[list[str]]:
    """The database refuses the first transaction: at its end, or after its commit."""
    told: list[str] = []
    real = rerun.write_transaction

    @contextmanager
    def write_transaction(*args: Any) -> Iterator[Connection]:
        with real(*args) as connection:
            yield connection
            if when == "before commit" and not told:
                told.append(when)
                raise refusal(lost)
        if not told:
            told.append(when)
            raise refusal(lost)

    with monkeypatch.context() as patched:
        patched.setattr(rerun, "write_transaction", write_transaction)
        yield told


def refusal(lost: bool) -> OperationalError:
    # The words of SQLite, which has no codes.
    error = type("OperationalError", (Exception,), {})("database is locked")
    return OperationalError("COMMIT", {}, error, connection_invalidated=lost)


# -- all or none -----------------------------------------------------------------------


@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
def test_ten_thousand_are_written_in_one_transaction_with_a_constant_number_of_statements(shop):
    shop.part.delay("the tables are looked for once per engine")
    shop.recorded.empty()
    with statements(shop.outbox) as sent:
        result = group(shop.part.s(number) for number in range(10_000)).apply_async()
    assert len(result) == 10_000
    assert shop.recorded.counts()[0] == 10_000
    assert sent.count("COMMIT") == 1
    # Three for five hundred calls, and two for the transaction on SQLite; MariaDB has a limit
    # of its own for one statement.
    assert len(sent) < 110


@pytest.mark.parametrize("canvas", ["group", "chord"])
@pytest.mark.parametrize("tasks", ["list", "generator"])
def test_none_is_recorded_where_one_cannot_be(shop, canvas, tasks):
    members: Any = [shop.part.s(1), shop.part.s(2), shop.part.s(object()), shop.part.s(4)]
    members = members if tasks == "list" else iter(members)
    with pytest.raises(UnserializableArgument):
        (group(members) if canvas == "group" else chord(members, shop.body.s())).delay()
    assert shop.recorded.counts() == NOTHING
    assert shop.chords() == []


def test_none_is_recorded_where_the_generator_fails(shop):
    def members() -> Iterator[Any]:
        yield from (shop.part.s(number) for number in range(600))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        group(members()).delay()
    assert shop.recorded.counts() == NOTHING
    group(shop.part.s(1), shop.part.s(2)).delay()
    assert shop.recorded.counts()[0] == 2


def test_a_chain_and_a_chord_in_a_group_belong_to_it(shop):
    inner = chord([shop.part.si(1), shop.part.si(2)], shop.part.si(3))
    steps = chain(shop.part.si(4), shop.part.si(5))
    with statements(shop.outbox) as sent:
        group(inner, steps, shop.part.si(6)).delay()
    assert sent.count("COMMIT") == 1
    assert shop.recorded.counts()[0] == 4
    with pytest.raises(UnserializableArgument):
        group(inner, steps, shop.part.si(object())).delay()
    assert shop.recorded.counts()[0] == 4
    assert shop.chords() == [("open", 2, 0)]


def test_an_id_of_another_task_s_job_is_an_error_of_the_call(shop):
    shop.body.apply_async((1,), task_id="taken")
    with pytest.raises(JobIdTaken):
        group(shop.part.s(1), shop.part.s(2).set(task_id="taken")).delay()
    assert shop.recorded.counts()[0] == 1


def test_where_a_transaction_is_required_nothing_of_a_chord_is_recorded(installed_url):
    with open_outbox(installed_url, init=False, outbox_require_transaction=True) as outbox:
        shop = Shop(outbox, Database(outbox.engine, outbox.tables))
        with pytest.raises(NoTransaction):
            chord([shop.part.s(1), shop.part.s(2)], shop.body.s()).delay()
        assert shop.recorded.counts() == NOTHING
        assert shop.chords() == []


# -- the database ----------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["rolled back", "connection lost"])
def test_a_transaction_that_the_database_rolled_back_is_run_again(shop, monkeypatch, lost):
    monkeypatch.setattr(rerun, "_was_rolled_back", lambda error: True)
    with failing_once(monkeypatch, "before commit", lost) as told:
        chord([shop.part.s(number) for number in range(3)], shop.body.s()).delay()
    assert told == ["before commit"]
    assert shop.recorded.counts() == (3, 3, 3)
    shop.run()
    shop.run()
    assert shop.calls == [[0, 1, 2]]


def test_a_commit_whose_answer_was_lost_counts_no_member_twice(shop, monkeypatch):
    with failing_once(monkeypatch, "after commit", lost=True) as told:
        chord([shop.part.s(number) for number in range(3)], shop.body.s()).delay()
    assert told == ["after commit"]
    assert shop.recorded.counts() == (3, 3, 3)
    shop.run(shop.part)
    assert shop.chords() == [("done", 3, 3)]
    shop.run(shop.body)
    assert shop.calls == [[0, 1, 2]]


def test_a_group_that_is_a_callback_waits_for_the_database(shop, monkeypatch):
    # Signatures that come out of a message belong to the current app.
    monkeypatch.setattr(_state._tls, "current_app", shop.outbox.app)
    job = add_task(shop.outbox.app, name="shop.job")
    job.apply_async(task_id="job", link=group(shop.part.si(1), shop.part.si(2)))
    real, told, job_table = rerun.write_transaction, [], shop.recorded.tables.job

    @contextmanager
    def write_transaction(*args: Any) -> Iterator[Connection]:
        with real(*args) as connection:
            yield connection
            members = select(job_table.c.id).where(job_table.c.task == "shop.part")
            if len(told) < 3 and connection.execute(members).first():
                told.append("away")
                raise refusal(lost=True)

    with monkeypatch.context() as patched:
        patched.setattr(rerun, "write_transaction", write_transaction)
        assert deliver(job, "job") == "SUCCESS"
    assert len(told) == 3
    assert len(shop.waiting("shop.part")) == 2


# -- generators that take their time ---------------------------------------------------


def test_no_connection_is_in_use_while_a_generator_takes_its_time(shop):
    used = []

    def members() -> Iterator[Any]:
        for number in range(5):
            used.append(shop.outbox.engine.pool.checkedout())
            # Another writer, which SQLite would not let in.
            shop.recorded.execute(f"UPDATE outbox_job SET attempt = {number} WHERE id = 'none'")
            yield shop.part.s(number)

    group(members()).delay()
    assert used == [0] * 5
    assert shop.recorded.counts()[0] == 5


@pytest.mark.parametrize("bound", ["PAUSE", "LONGEST"])
def test_what_a_generator_has_yielded_is_written_before_it_ends(shop, monkeypatch, bound):
    monkeypatch.setattr(batch, bound, 0.0)
    seen = []

    def members() -> Iterator[Any]:
        for number in range(6):
            seen.append(shop.recorded.counts()[0])
            yield shop.part.s(number)

    chord(members())(shop.body.s())
    assert seen[:2] == [0, 0]
    # Celery looks some members ahead; its own tests want the first one of four to run now.
    assert seen[3] >= 1
    assert shop.chords() == [("open", 6, 0)]
    shop.run()
    assert shop.calls == [[0, 1, 2, 3, 4, 5]]


def test_what_comes_at_once_after_a_pause_is_written_together(shop, monkeypatch):
    monkeypatch.setattr(batch, "SINGLE", 2)
    paused = []

    def members() -> Iterator[Any]:
        for number in range(20):
            if number == 5:
                # As if the generator had slept for longer than that.
                paused.append(shop.outbox._batches.here())
                paused[0]._last -= 700.0
            yield shop.part.s(number)

    with statements(shop.outbox) as sent:
        group(members()).delay()
    # All before the pause with the first one after it, another one, and the rest.
    assert sent.count("COMMIT") == 3
    assert shop.recorded.counts()[0] == 20


def test_a_list_is_all_or_none_however_long_it_takes(shop, monkeypatch):
    monkeypatch.setattr(batch, "PAUSE", 0.0)
    monkeypatch.setattr(batch, "LONGEST", 0.0)
    with pytest.raises(UnserializableArgument):
        group([shop.part.s(1), shop.part.s(2), shop.part.s(object())]).delay()
    assert shop.recorded.counts() == NOTHING


def test_a_generator_that_fails_later_leaves_what_was_written(shop, monkeypatch):
    monkeypatch.setattr(batch, "MOST_CALLS", 4)

    def members() -> Iterator[Any]:
        yield from (shop.part.s(number) for number in range(9))
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        group(members()).delay()
    assert shop.recorded.counts()[0] == 4


@pytest.mark.parametrize("bound", ["MOST_CALLS", "MOST_BYTES"])
def test_a_chord_that_is_too_large_for_one_transaction_is_counted_all_the_same(
    shop, monkeypatch, bound
):
    monkeypatch.setattr(batch, bound, 4 if bound == "MOST_CALLS" else 4_000)
    with statements(shop.outbox) as sent:
        chord([shop.part.s(number) for number in range(10)], shop.body.s()).delay()
    assert sent.count("COMMIT") > 2
    assert shop.chords() == [("open", 10, 0)]
    shop.run()
    assert shop.calls == [list(range(10))]


def test_what_could_not_be_written_in_the_middle_is_written_at_the_end(shop, monkeypatch):
    monkeypatch.setattr(batch, "PAUSE", 0.0)
    outbox = shop.outbox
    with outbox._batches.together(lazy=True):
        with monkeypatch.context() as patched:
            patched.setattr(batch, "PAUSE", 60.0)
            shop.part.apply_async((1,), task_id="first")
        with monkeypatch.context() as patched:
            patched.setattr(rerun, "write_transaction", lambda *_: refuse())
            with pytest.raises(OperationalError):
                shop.part.apply_async((2,), task_id="refused")
        shop.part.apply_async((3,), task_id="third")
    assert sorted(shop.waiting("shop.part")) == ["first", "third"]


def refuse() -> Any:
    raise refusal(lost=True)


# -- what does not belong to it --------------------------------------------------------


def test_calls_with_a_producer_of_celery_s_are_recorded_one_by_one(shop):
    with shop.outbox.app.producer_or_acquire() as producer:
        shop.part.apply_async((1,), producer=producer)
        assert shop.recorded.counts()[0] == 1


def test_a_call_with_a_transaction_of_its_own_belongs_to_that(shop):
    with Session(shop.outbox.engine) as session, shop.outbox.together():
        shop.part.apply_async((1,), session=session)
        shop.part.apply_async((2,))
        session.rollback()
    assert shop.recorded.counts()[0] == 1


def test_a_thread_with_the_context_of_a_group_records_by_itself(shop):
    contexts = []

    def in_thread(context: contextvars.Context, *args: Any) -> None:
        thread = threading.Thread(target=context.run, args=(shop.part.delay, *args))
        thread.start()
        thread.join()

    def members() -> Iterator[Any]:
        yield shop.part.s(1)
        contexts.append(contextvars.copy_context())
        in_thread(contexts[0].copy(), "meanwhile")
        assert shop.recorded.counts()[0] == 1
        yield shop.part.s(2)

    group(members()).delay()
    assert shop.recorded.counts()[0] == 3
    in_thread(contexts[0].copy(), "later")
    assert shop.recorded.counts()[0] == 4
    contexts[0].run(shop.part.delay, "in the same thread")
    assert shop.recorded.counts()[0] == 5


def test_an_asynchronous_task_that_was_started_in_a_block_records_by_itself(shop):
    counts = []

    async def call(value: int) -> None:
        shop.part.delay(value)

    async def main() -> None:
        with shop.outbox.together():
            shop.part.delay(0)
            late = asyncio.create_task(call(1))
            await asyncio.create_task(call(2))
            counts.append(shop.recorded.counts()[0])
        await late
        counts.append(shop.recorded.counts()[0])

    asyncio.run(main())
    # Two of tasks, and then the one of the block.
    assert counts == [2, 3]


def test_a_child_process_does_not_write_what_its_parent_has_called(shop):
    block = shop.outbox.together()
    block.__enter__()
    shop.part.delay(1)
    child = os.fork()
    if child == 0:
        block.__exit__(None, None, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert shop.recorded.counts() == NOTHING
    block.__exit__(None, None, None)
    assert shop.recorded.counts() == (1, 1, 1)


def test_a_call_of_another_app_goes_to_that_app_s_database(shop, tmp_path: Path):
    other = Outbox(make_app(outbox_database_url=f"sqlite:///{tmp_path / 'other.sqlite'}"))
    other.init()
    foreign = add_task(other.app, name="other.task")

    def members() -> Iterator[Any]:
        foreign.delay("of the generator")
        yield shop.part.s(1)
        yield foreign.s(2)

    group(members()).delay()
    assert shop.recorded.counts()[0] == 1
    assert Database(other.engine, other.tables).counts()[0] == 2
    other.engine.dispose()


def test_a_group_of_an_app_without_an_outbox_is_left_alone(shop):
    stock = make_stock_app()
    stock.conf.broker_url = "memory://"
    plain = add_task(stock, name="plain.task")
    with stock.connection_for_write() as connection:
        group(plain.s(1), plain.s(2)).delay()
        queue = connection.SimpleQueue("celery")
        assert queue.qsize() == 2
        queue.clear()
