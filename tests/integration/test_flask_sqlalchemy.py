"""Flask-SQLAlchemy's session is the configured session: nothing is said at the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import flask
import pytest
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_outbox import Outbox, WrongDatabase
from tests.factories import Database, add_task, make_app, open_database

NOTHING = (0, 0, 0)
ONE_JOB = (1, 1, 1)


class Shop:
    """A Flask app with the views that the tests visit."""

    def __init__(self, url: str, **conf: Any) -> None:
        class Base(DeclarativeBase):
            """The application's models."""

        db = SQLAlchemy(model_class=Base)

        class Order(db.Model):  # type: ignore[name-defined]
            __tablename__ = "orders_of_a_test"
            id: Mapped[int] = mapped_column(primary_key=True)

        self.flask = flask.Flask("shop")
        self.flask.config.update(SQLALCHEMY_DATABASE_URI=url, TESTING=False, **conf)
        db.init_app(self.flask)
        self.db, self.order = db, Order
        self.celery = make_app()
        self.outbox = Outbox(self.celery, session=db.session)
        self.export = add_task(self.celery)
        self.flask.add_url_rule("/order/<way>", view_func=self.view)

    def view(self, way: str) -> str:
        """Record an order and its job, and end as told."""
        self.db.session.add(self.order())
        job_id: str = self.export.delay(42).id
        if way == "raise":
            raise RuntimeError
        if way != "forget":
            getattr(self.db.session, way)()
        return job_id

    def orders(self) -> int:
        """How many orders are committed."""
        with self.flask.app_context():
            return int(self.db.session.query(self.order).count())


@pytest.fixture
def shop(installed_url: str) -> Iterator[Shop]:
    shop = Shop(installed_url)
    with shop.flask.app_context():
        shop.db.create_all()
    yield shop
    with shop.flask.app_context():
        shop.db.drop_all()
        shop.db.engine.dispose()


@pytest.mark.parametrize(
    ("way", "status", "jobs"),
    [("commit", 200, 1), ("rollback", 200, 0), ("raise", 500, 0), ("forget", 200, 0)],
)
def test_a_job_shares_the_fate_of_the_request(shop, installed_url, way, status, jobs):
    response = shop.flask.test_client().get(f"/order/{way}")
    assert response.status_code == status
    with open_database(installed_url, init=False) as database:
        recorded = Database(database.engine, shop.outbox.tables)
        assert recorded.counts() == (jobs, jobs, jobs)
        if jobs:
            assert recorded.job(response.text).state == "queued"
    assert shop.orders() == jobs


def test_a_request_after_one_that_failed_has_a_session_of_its_own(shop, installed_url):
    client = shop.flask.test_client()
    for way in ("raise", "forget", "commit"):
        client.get(f"/order/{way}")
    with open_database(installed_url, init=False) as database:
        assert database.counts() == ONE_JOB
    assert shop.orders() == 1


def test_the_default_bind_of_several_is_the_outbox_s(shop, installed_url, tmp_path):
    other = Shop(
        f"sqlite:///{tmp_path / 'other.sqlite'}", SQLALCHEMY_BINDS={"second": installed_url}
    )
    other.celery.conf.outbox_database_url = installed_url
    with other.flask.app_context():
        other.db.create_all()
        with pytest.raises(WrongDatabase):
            other.export.delay(42)
        other.db.session.rollback()
        for engine in other.db.engines.values():
            engine.dispose()
    other.outbox.engine.dispose()
    with open_database(installed_url, init=False) as database:
        assert database.counts() == NOTHING
