"""A session with several databases: its bind decides, and a wrong one is an error at the call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, event, make_url
from sqlalchemy.orm import Session, registry

from celery_outbox import Outbox, SchemaMissing, UnusableSession, WrongDatabase
from celery_outbox.store.engine import open_engine
from celery_outbox.store.place import same_place
from tests.factories import Database, add_task, make_app, open_database, open_outbox

NOTHING = (0, 0, 0)
ONE_JOB = (1, 1, 1)

orders = Table("orders_of_a_test", MetaData(), Column("id", Integer, primary_key=True))


@registry().mapped
class Order:
    """A row of it."""

    __table__ = orders


@pytest.fixture
def export(outbox: Outbox) -> Any:
    return add_task(outbox.app)


@pytest.fixture
def other(request: pytest.FixtureRequest, installed_url: str, tmp_path: Path) -> Iterator[Engine]:
    """Another database of the same kind, which has no outbox tables."""
    url = f"sqlite:///{tmp_path / 'other.sqlite'}"
    if installed_url.startswith("postgresql"):
        url = request.getfixturevalue("postgresql_url")
    engine = create_engine(url)
    orders.create(engine)
    yield engine
    engine.dispose()


def test_the_bind_of_the_job_table_decides(outbox, recorded, export, other):
    binds = {outbox.tables.job: outbox.engine, Order: other}
    for end in ("rollback", "commit"):
        with Session(binds=binds) as session, outbox.use(session):
            session.add(Order())
            session.flush()
            export.delay(42)
            getattr(session, end)()
    assert recorded.counts() == ONE_JOB
    with Session(other) as session:
        assert session.query(Order).count() == 1


def test_a_session_that_chooses_by_itself_is_asked_for_the_job_table(
    outbox, recorded, export, other
):
    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **options: Any) -> Engine:
            return outbox.engine if clause is outbox.tables.job else other

    with Routing() as session, outbox.use(session):
        session.add(Order())
        export.delay(42)
        session.commit()
    assert recorded.counts() == ONE_JOB


def test_a_session_without_a_bind_for_it_says_so(outbox, recorded, export, other):
    with Session(binds={Order: other}) as session:
        session.add(Order())
        with pytest.raises(UnusableSession, match="no bind for the outbox tables"):
            export.apply_async((42,), session=session)
        session.commit()
    assert recorded.counts() == NOTHING


@pytest.mark.parametrize("installed", [True, False])
def test_another_database_is_an_error_that_names_both(outbox, recorded, export, other, installed):
    if installed:
        with open_database(other.url.render_as_string(hide_password=False)):
            pass
    with Session(other) as session, outbox.use(session):
        session.add(Order())
        for _ in range(2):
            with pytest.raises(WrongDatabase) as error:
                export.delay(42)
            assert error.value.found == other.url.render_as_string()
            assert error.value.needed == outbox.engine.url.render_as_string()
        session.commit()
    assert recorded.counts() == NOTHING
    if installed:
        assert Database(other, outbox.tables).counts() == NOTHING


def test_without_tables_anywhere_the_error_says_what_to_run(other):
    app = make_app()
    Outbox(app)
    with Session(other) as session, pytest.raises(SchemaMissing, match="outbox init"):
        add_task(app).apply_async((42,), session=session)


def test_the_same_database_by_another_name_is_the_same(postgresql_installed_url):
    url = make_url(postgresql_installed_url).set(host="localhost")
    engine = create_engine(url)
    with open_outbox(postgresql_installed_url, init=False) as outbox:
        assert not same_place(url, outbox.engine.url)
        with Session(engine) as session, session.begin():
            add_task(outbox.app).apply_async((42,), session=session)
        assert Database(outbox.engine, outbox.tables).counts() == ONE_JOB
    engine.dispose()


def test_both_are_asked_once(postgresql_installed_url):
    url = make_url(postgresql_installed_url)
    asked: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if "outbox_version.installation" in statement:
            asked.append(statement)

    with open_outbox(postgresql_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        named, again = create_engine(url.set(host="localhost")), open_engine(str(url))
        for engine in (outbox.engine, named, again):
            event.listen(engine, "before_cursor_execute", note)
        for engine in (named, again):
            for _ in range(3):
                with Session(engine) as session, session.begin():
                    export.apply_async((1,), session=session)
            engine.dispose()
        # named, and the outbox's own for it; again, which has the same address.
        assert len(asked) == 3


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("postgresql+psycopg2://a:b@host/shop", "postgresql+asyncpg://c@host:5432/shop", True),
        ("postgresql://host/shop", "postgresql://host/other", False),
        ("postgresql://host/shop", "postgresql://host:5433/shop", False),
        ("postgresql:///shop?host=/run/one", "postgresql:///shop?host=/run/two", False),
        ("sqlite:///a/../shop.db", "sqlite+aiosqlite:///shop.db?timeout=5", True),
        ("sqlite:///shop.db", "sqlite:///other.db", False),
        ("sqlite:///shop.db", "postgresql:///shop.db", False),
    ],
)
def test_urls_of_the_same_place_are_told_from_others(one, other, same):
    assert same_place(make_url(one), make_url(other)) is same
