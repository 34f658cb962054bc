"""A call is recorded in the caller's transaction, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox import NoTransaction, Outbox, UnusableSession
from celery_outbox.core.states import State
from celery_outbox.store import transitions
from tests.factories import Database, add_task, make_app, open_outbox

NOTHING = (0, 0, 0)
ONE_JOB = (1, 1, 1)


@pytest.fixture
def export(outbox: Outbox):
    return add_task(outbox.app)


@pytest.fixture
def session(outbox: Outbox) -> Iterator[Session]:
    with Session(outbox.engine) as session:
        yield session


def test_a_commit_leaves_one_job_one_message_and_one_journal_line(outbox, recorded, export):
    with Session(outbox.engine) as session, outbox.use(session):
        result = export.delay(42, "2026-01")
        assert session.in_transaction()
        session.commit()
    assert recorded.counts() == ONE_JOB
    job = recorded.job(result.id)
    assert (job.state, job.task, job.queue, job.max_attempts) == (
        State.QUEUED,
        "shop.export",
        "celery",
        3,
    )
    assert recorded.events(result.id) == ["recorded"]


@pytest.mark.parametrize("way", ["use", "option", "connection", "scoped", "callable"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_call_shares_the_fate_of_the_callers_transaction(outbox, recorded, export, way, end):
    factory = scoped_session(sessionmaker(outbox.engine))
    owner = outbox.engine.connect() if way == "connection" else factory()
    if way in ("use", "connection"):
        with outbox.use(owner):
            export.delay(42)
    elif way == "option":
        export.apply_async((42,), session=owner)
    elif way == "scoped":
        export.apply_async((42,), session=factory)
    else:
        with outbox.use(lambda: owner):
            export.delay(42)
    getattr(owner, end)()
    assert recorded.counts() == (ONE_JOB if end == "commit" else NOTHING)
    owner.close()
    factory.remove()


@pytest.mark.parametrize("kind", ["scoped", "callable"])
def test_a_configured_session_is_used_without_a_word_at_the_call(installed_url, kind):
    with open_outbox(installed_url, init=False) as first:
        factory = scoped_session(sessionmaker(first.engine))
        current = factory if kind == "scoped" else lambda: factory()
        app = make_app(outbox_database_url=installed_url)
        outbox = Outbox(app, engine=first.engine, session=current)
        add_task(app).delay(42)
        factory.rollback()
        assert Database(first.engine, outbox.tables).counts() == NOTHING
        add_task(app).delay(42)
        factory.commit()
        assert Database(first.engine, outbox.tables).counts() == ONE_JOB
        factory.remove()


def test_a_configured_callable_without_a_session_leaves_the_call_on_its_own(installed_url):
    app = make_app(outbox_database_url=installed_url)
    outbox = Outbox(app, session=lambda: None)
    add_task(app).delay(42)
    assert Database(outbox.engine, outbox.tables).counts() == ONE_JOB
    outbox.engine.dispose()


def test_without_a_session_a_call_has_a_transaction_of_its_own(recorded, export):
    result = export.delay(42)
    assert recorded.job(result.id).state is State.QUEUED


def test_where_transactions_are_required_a_call_without_one_is_an_error(installed_url):
    with open_outbox(installed_url, init=False, outbox_require_transaction=True) as outbox:
        export = add_task(outbox.app)
        with pytest.raises(NoTransaction, match=r"Task shop\.export .*with outbox\.use\(session\)"):
            export.delay(42)
        assert Database(outbox.engine, outbox.tables).counts() == NOTHING
        with Session(outbox.engine) as session, outbox.use(session):
            export.delay(42)
            session.commit()
        assert Database(outbox.engine, outbox.tables).counts() == ONE_JOB


@pytest.mark.parametrize(("end", "counts"), [("rollback", NOTHING), ("commit", ONE_JOB)])
def test_a_savepoint_decides_about_its_own_calls(session, outbox, recorded, export, end, counts):
    session.begin()
    savepoint = session.begin_nested()
    export.apply_async((42,), session=session)
    getattr(savepoint, end)()
    session.commit()
    assert recorded.counts() == counts


def test_the_option_is_nearer_than_the_block_and_the_block_ends(outbox, recorded, export, session):
    with outbox.engine.connect() as connection:
        with outbox.use(connection):
            export.apply_async((1,), session=session)
        session.commit()
        assert recorded.counts() == ONE_JOB
    export.delay(2)
    assert recorded.counts() == (2, 2, 2)


def test_blocks_nest(outbox, recorded, export, session):
    with outbox.engine.connect() as outer, outbox.use(outer):
        with outbox.use(session):
            export.delay("inner")
        session.commit()
        session.close()
        export.delay("outer")
        outer.rollback()
    assert recorded.counts() == ONE_JOB


def test_threads_do_not_see_each_others_session(outbox, recorded, export, session):
    with outbox.use(session):
        thread = threading.Thread(target=export.delay, args=(42,))
        thread.start()
        thread.join()
        assert not session.in_transaction()
    assert recorded.counts() == ONE_JOB


def test_async_tasks_do_not_see_each_others_session(installed_url):
    used: dict[str, object] = {}

    async def both(outbox: Outbox) -> None:
        turns = [asyncio.Event(), asyncio.Event()]

        async def one(number: int) -> None:
            with outbox.use(number):
                turns[number].set()
                await turns[1 - number].wait()
                used[str(number)] = outbox._owners.used()

        await asyncio.gather(one(0), one(1))

    with open_outbox(installed_url, init=False) as outbox:
        asyncio.run(both(outbox))
    assert used == {"0": 0, "1": 1}


def test_what_is_no_session_says_what_to_pass(export, recorded):
    with pytest.raises(UnusableSession, match="pass a SQLAlchemy Session, scoped_session or Conn"):
        export.apply_async((42,), session="session")
    with pytest.raises(UnusableSession, match=r"no bind.*Session\(bind=engine\)"):
        export.apply_async((42,), session=Session())
    assert recorded.counts() == NOTHING


def test_the_callers_own_rows_and_the_job_are_one_transaction(session, outbox, recorded, export):
    session.execute(text("CREATE TABLE IF NOT EXISTS orders_of_a_test (id INTEGER)"))
    session.commit()
    session.execute(text("INSERT INTO orders_of_a_test VALUES (1)"))
    export.apply_async((1,), session=session)
    session.rollback()
    rows = session.execute(text("SELECT count(*) FROM orders_of_a_test")).scalar_one()
    assert (rows, recorded.counts()) == (0, NOTHING)
    session.execute(text("DROP TABLE orders_of_a_test"))
    session.commit()


# -- stable ids ------------------------------------------------------------------------


@pytest.mark.parametrize("state", State)
def test_a_second_request_finds_the_first_job_whatever_its_state(recorded, export, state):
    job = recorded.put(state, job_id="export-42")
    before = recorded.counts()
    result = export.apply_async((43,), task_id="export-42")
    assert result.id == "export-42"
    assert recorded.counts() == before
    assert recorded.job("export-42").state is state
    assert recorded.job("export-42").body == job.body


def test_a_request_that_was_rolled_back_was_never_made(session, recorded, export):
    export.apply_async((42,), task_id="export-42", session=session)
    session.rollback()
    export.apply_async((43,), task_id="export-42")
    assert recorded.counts() == ONE_JOB
    assert b"43" in recorded.job("export-42").body


def test_of_requests_in_concurrent_transactions_one_is_recorded(outbox, recorded, export):
    ready, errors = threading.Barrier(4), []

    def request() -> None:
        ready.wait()
        try:
            export.apply_async((42,), task_id="export-42")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=request) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert recorded.counts() == ONE_JOB


def test_two_open_transactions_with_one_id_end_in_one_job(postgresql_installed_url):
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        recorded = Database(outbox.engine, outbox.tables)
        with Session(outbox.engine) as first:
            export.apply_async((1,), task_id="export-42", session=first)
            second = threading.Thread(
                target=export.apply_async, args=((2,),), kwargs={"task_id": "export-42"}
            )
            second.start()
            first.commit()
            second.join()
        assert recorded.counts() == ONE_JOB
        assert b"1" in recorded.job("export-42").body


def test_a_finished_job_is_not_run_again_by_a_second_request(recorded, export):
    job = recorded.put(State.SUCCEEDED, job_id="export-42")
    export.apply_async((42,), task_id="export-42")
    assert recorded.messages("export-42") == []
    assert not recorded.do(transitions.claim, job, actor="worker", lease=60)
