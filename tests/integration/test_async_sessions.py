"""Calls in coroutines are recorded in the transaction of an asynchronous session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import greenlet
import pytest
from celery import chord, group
from celery.app.control import Control
from sqlalchemy import event, func, make_url, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import sessionmaker

from celery_outbox import JobIdTaken, Outbox, UnusableSession
from celery_outbox.core.states import State
from tests.factories import add_task, make_app

NOTHING = (0, 0, 0)
ONE_JOB = (1, 1, 1)

DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "psycopg": "postgresql+psycopg",
    "asyncpg": "postgresql+asyncpg",
}


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def installed_url(request: pytest.FixtureRequest, driver: str) -> str:
    kind = "sqlite" if driver == "sqlite" else "postgresql"
    return request.getfixturevalue(f"{kind}_installed_url")


@pytest.fixture
def export(outbox: Outbox) -> Any:
    return add_task(outbox.app)


@asynccontextmanager
async def asynchronous(outbox: Outbox, driver: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    url = make_url(str(outbox.engine.url.render_as_string(hide_password=False)))
    engine = create_async_engine(url.set(drivername=DRIVERS[driver]), **options)
    try:
        yield engine
    finally:
        await engine.dispose()


@pytest.fixture
def run(outbox: Outbox, driver: str) -> Callable[..., Any]:
    """Run a coroutine with an AsyncSession that the outbox uses."""

    def run(work: Callable[[AsyncSession], Awaitable[Any]], **options: Any) -> Any:
        async def main() -> Any:
            async with (
                asynchronous(outbox, driver) as engine,
                AsyncSession(engine, **options) as session,
            ):
                with outbox.use(session):
                    return await work(session)

        return asyncio.run(main())

    return run


# -- what has to ask the database -----------------------------------------------------


def call_chord(outbox: Outbox, export: Any) -> None:
    chord([export.s(1), export.s(2)], export.s()).apply_async()


def call_chord_in_a_chain(outbox: Outbox, export: Any) -> None:
    (group(export.s(1), export.s(2)) | export.s()).delay()


def cancel(outbox: Outbox, export: Any) -> None:
    outbox.cancel("waits")


def revoke(outbox: Outbox, export: Any) -> None:
    outbox.app.control.revoke("waits")


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("act", [call_chord, call_chord_in_a_chain, cancel, revoke])
def test_what_has_to_ask_the_database_says_where_it_can(
    outbox, recorded, export, run, monkeypatch, connected, act
):
    told: list[Any] = []
    monkeypatch.setattr(Control, "broadcast", lambda self, *args, **options: told.append(args))
    export.apply_async(task_id="waits")

    async def work(session: AsyncSession) -> None:
        if connected:
            await session.execute(text("SELECT 1"))
        with pytest.raises(UnusableSession, match="run_sync"):
            act(outbox, export)
        await session.commit()
        assert (recorded.counts(), told) == (ONE_JOB, [])
        await session.run_sync(lambda sync: act(outbox, export))
        assert (recorded.counts(), told) == (ONE_JOB, [])
        await session.commit()

    run(work)
    if act in (cancel, revoke):
        assert recorded.job("waits").state is State.CANCELLED
        assert len(told) == (1 if act is revoke else 0)
    else:
        assert recorded.counts()[0] == 3


# -- nothing was done in the session before the call -----------------------------------


@pytest.mark.parametrize(("end", "counts"), [("commit", ONE_JOB), ("rollback", NOTHING)])
def test_a_call_is_the_first_thing_in_the_session(recorded, export, run, end, counts):
    async def work(session: AsyncSession) -> Any:
        result = export.delay(42)
        assert session.in_transaction()
        await getattr(session, end)()
        return result

    result = run(work)
    assert recorded.counts() == counts
    if counts == ONE_JOB:
        assert recorded.events(result.id) == ["recorded"]


def test_a_session_that_is_closed_has_recorded_nothing(recorded, export, run):
    async def work(session: AsyncSession) -> None:
        export.delay(42)

    run(work)
    assert recorded.counts() == NOTHING


def test_explicit_begin_and_calls_before_and_after_a_statement(recorded, export, run):
    async def work(session: AsyncSession) -> list[str]:
        async with session.begin():
            made = [export.delay(1).id]
            await session.execute(text("SELECT 1"))
            made.append(export.delay(2).id)
            found = await session.execute(select(recorded.tables.job.c.id))
            assert sorted(found.scalars()) == sorted(made)
            made.append(export.delay(3).id)
        return made

    made = run(work)
    assert [message.job_id for message in recorded.messages()] == made


def test_a_statement_that_names_the_tables_sees_the_first_call(recorded, export, run):
    async def work(session: AsyncSession) -> int | None:
        export.delay(1)
        return await session.scalar(select(func.count()).select_from(recorded.tables.job))

    assert run(work) == 1
    assert recorded.counts() == NOTHING


def test_an_exception_in_the_block_undoes_its_calls_and_the_session_goes_on(recorded, export, run):
    async def fail(session: AsyncSession) -> None:
        async with session.begin():
            export.delay(1)
            raise RuntimeError

    async def work(session: AsyncSession) -> None:
        with pytest.raises(RuntimeError):
            await fail(session)
        export.delay(2)
        await session.commit()
        export.delay(3)
        await session.rollback()

    run(work)
    assert recorded.counts() == ONE_JOB


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    ("inner", "outer", "kept"),
    [
        ("rollback", "commit", ["before", "after"]),
        ("commit", "rollback", []),
        ("commit", "commit", ["before", "inside", "after"]),
    ],
)
def test_a_savepoint_decides_about_its_own_calls(recorded, export, run, begun, inner, outer, kept):
    async def work(session: AsyncSession) -> dict[str, str]:
        names = {}
        if begun:
            await session.connection()
        names[export.delay("before").id] = "before"
        point = await session.begin_nested()
        names[export.delay("inside").id] = "inside"
        await getattr(point, inner)()
        names[export.delay("after").id] = "after"
        await getattr(session, outer)()
        return names

    names = run(work)
    assert [names[message.job_id] for message in recorded.messages()] == kept


def test_a_session_that_does_not_begin_by_itself_must_be_begun(recorded, export, run):
    async def work(session: AsyncSession) -> None:
        with pytest.raises(UnusableSession, match=r"begin\(\) it first"):
            export.delay(1)
        async with session.begin():
            export.delay(2)

    run(work, autobegin=False)
    assert recorded.counts() == ONE_JOB


# -- the other kinds -------------------------------------------------------------------


@pytest.mark.parametrize(("end", "counts"), [("commit", ONE_JOB), ("rollback", NOTHING)])
def test_a_connection_records_too(outbox, recorded, export, driver, end, counts):
    async def main() -> None:
        async with asynchronous(outbox, driver) as engine, engine.connect() as connection:
            export.apply_async((42,), session=connection)
            await getattr(connection, end)()

    asyncio.run(main())
    assert recorded.counts() == counts


def test_a_connection_that_is_not_open_says_so(outbox, recorded, export, driver):
    async def main() -> None:
        async with asynchronous(outbox, driver) as engine:
            with pytest.raises(UnusableSession, match="AsyncConnection that is open"):
                export.apply_async((42,), session=engine.connect())

    asyncio.run(main())
    assert recorded.counts() == NOTHING


@pytest.mark.parametrize("configured", [True, False])
def test_a_scoped_session_is_the_one_of_the_task(
    installed_url, recorded, outbox, driver, configured
):
    async def main() -> None:
        async with asynchronous(outbox, driver) as engine:
            scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            app = make_app(outbox_database_url=installed_url)
            mine = Outbox(app, session=scoped) if configured else Outbox(app)
            export = add_task(app)
            with mine.use(scoped):
                export.delay(1)
            await scoped.rollback()
            if configured:
                export.delay(2)
            else:
                export.apply_async((2,), session=scoped)
            await scoped.commit()
            await scoped.remove()
            mine.engine.dispose()

    asyncio.run(main())
    assert recorded.counts() == ONE_JOB


@pytest.mark.parametrize("maker", [sessionmaker, async_sessionmaker])
def test_what_makes_sessions_is_no_session(recorded, export, maker):
    with pytest.raises(UnusableSession, match="maker: "):
        export.apply_async((1,), session=maker())
    assert recorded.counts() == NOTHING


# -- what needs the database at the call -----------------------------------------------


def test_an_id_of_the_caller_s_own_is_looked_up_at_the_commit(recorded, export, run):
    recorded.put(State.QUEUED, job_id="export-1")
    recorded.put(State.QUEUED, job_id="taken", task="shop.other")
    before = recorded.counts()

    async def work(session: AsyncSession) -> None:
        export.apply_async((1,), task_id="export-1")
        export.apply_async((2,), task_id="export-2")
        export.apply_async((3,), task_id="export-2")
        await session.commit()
        export.apply_async((4,), task_id="export-4")
        export.apply_async((5,), task_id="taken")
        with pytest.raises(JobIdTaken):
            await session.commit()
        await session.rollback()

    run(work)
    assert recorded.counts() == tuple(number + 1 for number in before)
    assert b"2" in recorded.job("export-2").body


def test_in_run_sync_it_is_looked_up_at_the_call(recorded, export, run):
    recorded.put(State.QUEUED, job_id="taken", task="shop.other")
    before = recorded.counts()

    async def work(session: AsyncSession) -> None:
        await session.run_sync(lambda sync: export.apply_async((1,), session=sync))
        with pytest.raises(JobIdTaken):
            await session.run_sync(
                lambda sync: export.apply_async((2,), task_id="taken", session=sync)
            )
        await session.commit()

    run(work)
    assert recorded.counts() == tuple(number + 1 for number in before)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_autocommit_cannot_be_used_in_a_coroutine(outbox, recorded, export, driver):
    async def main() -> None:
        async with (
            asynchronous(outbox, driver, isolation_level="AUTOCOMMIT") as engine,
            engine.connect() as connection,
        ):
            with pytest.raises(UnusableSession, match=r"in autocommit; call it inside `await"):
                export.apply_async((1,), session=connection)
            await connection.run_sync(lambda sync: export.apply_async((2,), session=sync))

    asyncio.run(main())
    assert recorded.counts() == ONE_JOB


# aiosqlite leaves a coroutine behind that nobody awaits.
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_transaction_that_begins_with_a_statement_says_how_to_call(
    outbox, recorded, export, driver
):
    async def main() -> None:
        async with asynchronous(outbox, driver) as engine:
            event.listen(engine.sync_engine, "begin", lambda c: c.exec_driver_sql("SELECT 1"))
            async with engine.connect() as connection:
                with pytest.raises(UnusableSession, match=r"without asking the database; call it"):
                    export.apply_async((1,), session=connection)
                await connection.run_sync(lambda sync: export.apply_async((2,), session=sync))
                await connection.commit()

    asyncio.run(main())
    assert recorded.counts() == ONE_JOB


def test_an_error_of_the_write_comes_out_of_the_commit_and_the_session_goes_on(
    outbox, recorded, export, run
):
    job = recorded.tables.job.name

    async def work(session: AsyncSession) -> None:
        export.delay(1)
        recorded.execute(f"ALTER TABLE {job} RENAME TO away")
        try:
            with pytest.raises(DBAPIError):
                await session.commit()
            await session.rollback()
        finally:
            recorded.execute(f"ALTER TABLE away RENAME TO {job}")
        export.delay(2)
        await session.commit()

    run(work)
    assert recorded.counts() == ONE_JOB


# -- side by side ----------------------------------------------------------------------


class Turn:
    """Lets tasks go on when all of them have come so far (asyncio.Barrier is of Python 3.11)."""

    def __init__(self, tasks: int) -> None:
        self.tasks, self.waiting, self.event = tasks, 0, asyncio.Event()

    async def wait(self) -> None:
        self.waiting += 1
        event = self.event
        if self.waiting < self.tasks:
            await event.wait()
        else:
            self.waiting, self.event = 0, asyncio.Event()
            event.set()


def test_tasks_that_run_side_by_side_record_each_in_its_own_session(
    outbox, recorded, driver, export
):
    async def one(engine: AsyncEngine, number: int, turn: Turn) -> list[str]:
        async with AsyncSession(engine) as session:
            with outbox.use(session):
                made = [export.delay(number).id]
                await turn.wait()
                await session.execute(text("SELECT 1"))
                made.append(export.delay(number).id)
                await turn.wait()
            await (session.commit() if number % 2 else session.rollback())
        return made if number % 2 else []

    async def main() -> set[str]:
        async with asynchronous(outbox, driver) as engine:
            turn = Turn(4)
            made = await asyncio.gather(*(one(engine, number, turn) for number in range(4)))
            return {job_id for each in made for job_id in each}

    made = asyncio.run(main())
    assert {message.job_id for message in recorded.messages()} == made
    assert len(made) == 4


def test_a_call_while_the_same_session_is_committed_elsewhere_is_not_lost(
    outbox, recorded, export, run
):
    async def work(session: AsyncSession) -> None:
        connection = await session.connection()
        refused: list[Exception] = []

        def meanwhile(sync: Any) -> None:
            # As another coroutine would, which is no part of what SQLAlchemy runs here.
            def call() -> None:
                try:
                    export.apply_async((2,), session=session)
                except UnusableSession as error:
                    refused.append(error)

            greenlet.greenlet(call).switch()

        export.delay(1)
        event.listen(connection.sync_connection.engine, "commit", meanwhile, once=True)
        await session.commit()
        assert "somebody else is ending its transaction" in str(refused[0])

    run(work)
    assert recorded.counts() == ONE_JOB


def test_a_thousand_calls_in_a_coroutine_cost_a_constant_number_of_statements(
    outbox, recorded, export, run
):
    sent: list[str] = []

    async def work(session: AsyncSession) -> None:
        def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
            sent.append(statement)

        export.delay("once per engine")
        await session.commit()
        event.listen(session.get_bind(), "before_cursor_execute", note)
        for number in range(1_000):
            export.delay(number)
        await session.commit()

    run(work)
    assert len(sent) == (2 if outbox.engine.dialect.name == "postgresql" else 6)
    assert recorded.counts() == (1_001,) * 3
