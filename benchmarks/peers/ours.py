"""celery-outbox: the web process."""

from __future__ import annotations

from typing import Any

from celery import Celery, group
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from benchmarks import backlog
from benchmarks.peers import order
from benchmarks.peers.round_trips import RoundTrips
from benchmarks.peers.timing import PERIOD, Stamps, paced, seconds_of
from benchmarks.stage import Place
from celery_outbox import Outbox


class Caller:
    """A web process that calls ``.delay()`` in its own transactions; never talks to the broker.

    Arguments:
        settings: ``outbox_*`` settings that are not the defaults.
    """

    def __init__(self, place: Place, settings: dict[str, Any] | None = None) -> None:
        self._place = place
        self.app = make_app(place, settings or {})
        self.outbox = Outbox(self.app)
        self.outbox.init()
        self._noop = self.app.task(name="bench.noop")(body)
        self._stamp = self.app.task(name="bench.stamp")(body)
        # The caller's own engine, as the caller would make it.
        self.engine = create_engine(place.database)
        order.create(self.engine)
        self._session = sessionmaker(self.engine)
        self.calls_in_transactions(1)
        self.calls_alone(1)
        self.clean()

    def calls_in_transactions(self, count: int) -> float:
        """So many times: begin, ``.delay()``, commit."""

        def work() -> None:
            for number in range(count):
                with self._session.begin() as session, self.outbox.use(session):
                    self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def calls_with_a_row(self, count: int) -> float:
        """So many times: begin, insert a row, ``.delay()``, commit."""

        def work() -> None:
            for number in range(count):
                with self._session.begin() as session, self.outbox.use(session):
                    session.add(order.new(number))
                    self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def rows(self, count: int) -> float:
        """So many times: begin, insert a row, commit; without any call."""

        def work() -> None:
            for number in range(count):
                with self._session.begin() as session:
                    session.add(order.new(number))

        return seconds_of(work)

    def calls_alone(self, count: int) -> float:
        """So many ``.delay()`` with no transaction of the caller's."""

        def work() -> None:
            for number in range(count):
                self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def calls_in_one_transaction(self, count: int) -> float:
        """Begin, so many ``.delay()``, commit."""

        def work() -> None:
            with self._session.begin() as session, self.outbox.use(session):
                for number in range(count):
                    self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def group_in_one_transaction(self, count: int) -> float:
        """Begin, a group of so many tasks, commit."""

        def work() -> None:
            with self._session.begin() as session, self.outbox.use(session):
                group(self._noop.s(number, PERIOD) for number in range(count)).apply_async()

        return seconds_of(work)

    def has_record_many(self) -> bool:
        """Whether this version has it."""
        return hasattr(self.outbox, "record_many")

    def record_many(self, count: int) -> float:
        """Begin, ``record_many`` of so many calls, commit."""

        def work() -> None:
            with self._session.begin() as session, self.outbox.use(session):
                self.outbox.record_many(
                    self._noop, [((number, PERIOD), {}) for number in range(count)]
                )

        return seconds_of(work)

    def stamped(self, first: int, count: int, per_second: float) -> Stamps:
        """Transactions of one call at this rate, each with the time of its commit."""

        def prepare(number: int) -> Any:
            session: Session = self._session()
            with self.outbox.use(session):
                self._stamp.delay(number, PERIOD)

            def commit() -> None:
                session.commit()
                session.close()

            return commit

        return paced(range(first, first + count), per_second, prepare)

    def round_trips(self) -> dict[str, int]:
        """How often the caller's connection asks the server, begin and commit included: exactly,
        in its protocol."""
        with RoundTrips.to(self._place.database) as counter:
            engine = create_engine(counter.url)
            sessions = sessionmaker(engine)

            def transaction(rows: int, calls: int) -> None:
                with sessions.begin() as session, self.outbox.use(session):
                    session.add_all([order.new(number) for number in range(rows)])
                    for number in range(calls):
                        self._noop.delay(number, PERIOD)

            found = {}
            for what, rows, calls in (
                ("the caller's row alone", 1, 0),
                ("the caller's row and one call", 1, 1),
                ("one call", 0, 1),
                ("1,000 calls", 0, 1000),
                ("2,000 calls", 0, 2000),
            ):
                # The first one also connects, and asks what server it is.
                transaction(rows, min(calls, 1))
                before = counter.count
                transaction(rows, calls)
                found[what] = counter.count - before
            engine.dispose()
        self.clean()
        return found

    def clean(self) -> None:
        """Empty the tables."""
        with self.engine.begin() as connection:
            connection.execute(text("TRUNCATE shop_order"))
            backlog.clear(connection, self.outbox.tables)


def make_app(place: Place, settings: dict[str, Any]) -> Celery:
    """The app of a place."""
    app = Celery(
        "bench", broker=place.broker, set_as_current=False, task_cls="celery_outbox:OutboxTask"
    )
    app.conf.outbox_database_url = place.database
    app.conf.task_ignore_result = True
    app.conf.update(settings)
    return app


def body(number: int, period: str) -> None:
    """Never run here."""
