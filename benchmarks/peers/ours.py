"""celery-outbox: the web process, and the dispatcher."""

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
        self._noop = self.app.task(name="bench.noop")(_body)
        self._stamp = self.app.task(name="bench.stamp")(_body)
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


class Dispatcher:
    """A dispatcher with a backlog."""

    def __init__(self, place: Place, settings: dict[str, Any] | None = None) -> None:
        self.app = make_app(place, settings or {})
        self.outbox = Outbox(self.app)
        self.outbox.init()
        self._noop = self.app.task(name="bench.noop")(_body)

    def fill(self, count: int) -> None:
        """Make so many due rows, as so many calls would have made them."""
        with self.outbox.engine.begin() as connection:
            backlog.clear(connection, self.outbox.tables)
        result = self._noop.delay(0, PERIOD)
        with self.outbox.engine.begin() as connection:
            backlog.multiply(connection, self.outbox.tables, result.id, count)
        backlog.settle(self.outbox.engine)

    def drain(self) -> float:
        """Publish everything; returns the seconds, connecting to the broker included.

        Raises:
            AssertionError: something was not published.
        """
        dispatcher = self.outbox.dispatcher()
        done: list[Any] = []
        seconds = seconds_of(lambda: done.append(dispatcher.drain()))
        [total] = done
        assert total.outage is None, total
        left = self.unpublished()
        assert left == 0, f"{left} rows are not marked"
        return seconds

    def batches(self, count: int) -> float:
        """Publish so many batches; returns messages per second."""
        dispatcher = self.outbox.dispatcher()
        published: list[int] = []
        try:
            # Connects.
            dispatcher.dispatch_batch()

            def work() -> None:
                for _ in range(count):
                    published.append(dispatcher.dispatch_batch().published)

            return sum(published) / seconds if (seconds := seconds_of(work)) else 0.0
        finally:
            dispatcher.close()

    def unpublished(self) -> int:
        """Rows that are not marked as published."""
        message = self.outbox.tables.message
        statement = text(f"SELECT count(*) FROM {message.name} WHERE published_at IS NULL")
        with self.outbox.engine.connect() as connection:
            return int(connection.execute(statement).scalar_one())

    def depth(self) -> int:
        """Messages in the broker's queue."""
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            return int(channel.queue_declare("celery", passive=True).message_count)

    def purge(self) -> None:
        """Empty the broker's queue."""
        with self.app.connection_for_write() as connection, connection.channel() as channel:
            channel.queue_purge("celery")


def make_app(place: Place, settings: dict[str, Any]) -> Celery:
    """The app of a place."""
    app = Celery(
        "bench", broker=place.broker, set_as_current=False, task_cls="celery_outbox:OutboxTask"
    )
    app.conf.outbox_database_url = place.database
    app.conf.task_ignore_result = True
    app.conf.update(settings)
    return app


def _body(number: int, period: str) -> None:
    """Never run here."""
