"""A body that leaves the transaction of its calls open does not count as a success."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from celery import chain
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_outbox import Outbox
from celery_outbox.core.states import State
from tests.factories import Database, make_app
from tests.integration.delivering import add_task, deliver


@pytest.fixture
def sessions(outbox):
    """The application's sessions, which the outbox is told of."""
    scoped = scoped_session(sessionmaker(outbox.engine))
    yield scoped
    scoped.remove()


@pytest.fixture
def shop(outbox, sessions):
    """An outbox whose calls belong to the application's session."""
    app = make_app(outbox_database_url=outbox.config.database_url)
    return Outbox(app, engine=outbox.engine, session=sessions)


def run(shop: Outbox, body, **options) -> str:
    """Run a body in a worker; returns the job's id."""
    task = add_task(shop.app, body, name="shop.body", **options)
    with Session(shop.engine) as session, session.begin():
        job_id = task.apply_async(session=session).id
    deliver(task, job_id)
    return job_id


def ended(recorded: Database, job_id: str) -> tuple[State, str | None]:
    job = recorded.job(job_id)
    return job.state, (job.error_code or "").rpartition(".")[2] or None


def test_a_call_that_was_never_committed_fails_its_body_for_good(shop, sessions, recorded):
    child = add_task(shop.app, name="shop.child")

    def body():
        sessions.execute(text("SELECT 1"))
        child.apply_async(task_id="child")

    job_id = run(shop, body)
    assert ended(recorded, job_id) == (State.QUARANTINED, "UncommittedCalls")
    assert recorded.counts()[0] == 1
    assert not sessions().in_transaction()


def test_a_call_that_was_committed_or_rolled_back_is_as_the_body_wanted(shop, sessions, recorded):
    child = add_task(shop.app, name="shop.child")

    def body():
        sessions.execute(text("SELECT 1"))
        child.apply_async(task_id="rolled-back")
        sessions.rollback()
        sessions.execute(text("SELECT 1"))
        child.apply_async(task_id="committed")
        sessions.commit()
        # Open again, and without a call.
        sessions.execute(text("SELECT 1"))

    job_id = run(shop, body)
    assert ended(recorded, job_id) == (State.SUCCEEDED, None)
    assert recorded.job("committed").state is State.QUEUED
    assert recorded.counts()[0] == 2


def test_a_session_of_the_bodys_own_that_stays_open_is_seen_too(shop, recorded):
    child = add_task(shop.app, name="shop.child")
    left_open = Session(shop.engine)

    def body():
        with shop.use(left_open):
            child.apply_async(task_id="child")

    job_id = run(shop, body)
    assert ended(recorded, job_id) == (State.QUARANTINED, "UncommittedCalls")
    left_open.close()


@pytest.mark.parametrize("way", ["task", "block"])
def test_the_calls_of_a_transactional_body_are_committed_for_it(shop, recorded, way):
    child = add_task(shop.app, name="shop.child")

    def body(self):
        if way == "task":
            child.apply_async(task_id="child")
        else:
            with self.transaction():
                child.apply_async(task_id="child")

    job_id = run(shop, body, bind=True, transactional=way == "task")
    assert ended(recorded, job_id) == (State.SUCCEEDED, None)
    assert recorded.job("child").state is State.QUEUED


@pytest.mark.parametrize("way", ["task", "chain", "poll"])
def test_a_body_that_goes_on_in_another_way_does_not_lose_its_calls(shop, sessions, recorded, way):
    child = add_task(shop.app, name="shop.child")
    ways = {"task": lambda: child.s(), "chain": lambda: chain(child.si(), child.si())}

    def body(self):
        sessions.execute(text("SELECT 1"))
        child.apply_async(task_id="child")
        raise self.retry(countdown=0) if way == "poll" else self.replace(ways[way]())

    job_id = run(shop, body, bind=True)
    assert ended(recorded, job_id) == (State.QUARANTINED, "UncommittedCalls")
    assert recorded.counts()[0] == 1
    assert not sessions().in_transaction()


def test_an_attempt_that_failed_and_is_made_again_calls_again(shop, sessions, recorded):
    child = add_task(shop.app, name="shop.child")

    def body(self):
        sessions.execute(text("SELECT 1"))
        child.delay()
        if self.request.retries == 0:
            raise self.retry(exc=OSError(), countdown=0)
        sessions.commit()

    job_id = run(shop, body, bind=True)
    assert ended(recorded, job_id)[0] is State.RETRYING
    assert recorded.counts()[0] == 1
    recorded.make_due(job_id)
    deliver(shop.app.tasks["shop.body"], job_id)
    assert ended(recorded, job_id) == (State.SUCCEEDED, None)
    assert recorded.counts()[0] == 2


def test_a_block_that_ends_the_job_does_not_lose_the_calls_before_it(shop, recorded):
    child = add_task(shop.app, name="shop.child")
    left_open = Session(shop.engine)

    def body(self):
        child.apply_async(session=left_open)
        with self.transaction():
            child.delay()

    job_id = run(shop, body, bind=True)
    assert ended(recorded, job_id) == (State.QUARANTINED, "UncommittedCalls")
    assert recorded.counts()[0] == 1
    left_open.close()


@pytest.mark.parametrize("kind", ["session", "connection", "savepoint"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_nothing_is_kept_of_the_transactions_that_a_body_has_ended(shop, recorded, kind, end):
    child = add_task(shop.app, name="shop.child")
    noted = []

    def body():
        for _ in range(20):
            owner = shop.engine.connect() if kind == "connection" else Session(shop.engine)
            with owner, shop.use(owner):
                if kind == "savepoint":
                    with owner.begin_nested():
                        child.delay()
                else:
                    child.delay()
                connection = owner if kind == "connection" else owner.connection()
                noted.append(weakref.ref(connection.get_transaction()))
                getattr(owner, end)()
        del owner, connection
        gc.collect()
        noted.append(len([each for each in noted if each() is not None]))

    job_id = run(shop, body)
    assert ended(recorded, job_id) == (State.SUCCEEDED, None)
    assert recorded.counts()[0] == (21 if end == "commit" else 1)
    # The last one is looked at once more when another call is made.
    assert noted[-1] <= 1


def test_one_of_many_transactions_that_stays_open_is_seen(shop, recorded):
    child = add_task(shop.app, name="shop.child")
    left_open = Session(shop.engine)

    def body():
        child.apply_async(session=left_open)
        for _ in range(3):
            with shop.engine.connect() as connection:
                child.apply_async(session=connection)
                connection.rollback()

    job_id = run(shop, body)
    assert ended(recorded, job_id) == (State.QUARANTINED, "UncommittedCalls")
    left_open.close()
    assert recorded.counts()[0] == 1


@pytest.mark.parametrize(("end", "state"), [("commit", State.SUCCEEDED), (None, State.QUARANTINED)])
def test_a_savepoint_that_was_released_belongs_to_its_transaction(shop, recorded, end, state):
    child = add_task(shop.app, name="shop.child")
    session = Session(shop.engine)

    def body():
        with session.begin_nested():
            child.apply_async(session=session)
        if end is not None:
            getattr(session, end)()

    assert ended(recorded, run(shop, body))[0] is state
    session.close()
    assert recorded.counts()[0] == (2 if end == "commit" else 1)


@pytest.mark.parametrize("installed_url", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize(("end", "state"), [("commit", State.SUCCEEDED), (None, State.QUARANTINED)])
def test_the_session_of_a_coroutine_that_stays_open_is_seen(shop, recorded, connected, end, state):
    child = add_task(shop.app, name="shop.child")
    loop = asyncio.new_event_loop()
    url = shop.engine.url
    driver = "sqlite+aiosqlite" if url.get_backend_name() == "sqlite" else "postgresql+psycopg"
    engine = create_async_engine(url.set(drivername=driver))
    session = AsyncSession(engine)

    async def work() -> None:
        if connected:
            await session.execute(text("SELECT 1"))
        child.apply_async(session=session)
        if end is not None:
            await getattr(session, end)()

    async def close() -> None:
        await session.close()
        await engine.dispose()

    job_id = run(shop, lambda: loop.run_until_complete(work()))
    loop.run_until_complete(close())
    loop.close()
    assert ended(recorded, job_id)[0] is state
    assert recorded.counts()[0] == (2 if end == "commit" else 1)
