"""Stock Celery."""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from benchmarks.peers import order
from benchmarks.peers.timing import PERIOD, Stamps, paced, seconds_of
from benchmarks.stage import Place


class Caller:
    """A web process that calls ``.delay()``.

    Arguments:
        confirm: wait for the broker's confirm of every message (RabbitMQ).
    """

    def __init__(self, place: Place, confirm: bool) -> None:
        app = Celery("bench", broker=place.broker, set_as_current=False)
        app.conf.task_ignore_result = True
        if confirm:
            app.conf.broker_transport_options = {"confirm_publish": True}
        self._app = app
        self._noop = app.task(name="bench.noop")(_body)
        self._stamp = app.task(name="bench.stamp")(_body)
        self._engine = create_engine(place.database)
        order.create(self._engine)
        self._session = sessionmaker(self._engine)
        # Connects, and declares the queue.
        self._noop.delay(0, PERIOD)
        with self._session() as session:
            session.connection()
        self.clean()

    def calls(self, count: int) -> float:
        """So many ``.delay()``; returns the seconds."""

        def work() -> None:
            for number in range(count):
                self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def calls_after_a_row(self, count: int) -> float:
        """So many times: insert a row, commit, and then ``.delay()``."""

        def work() -> None:
            for number in range(count):
                with self._session.begin() as session:
                    session.add(order.new(number))
                self._noop.delay(number, PERIOD)

        return seconds_of(work)

    def stamped(self, first: int, count: int, per_second: float) -> Stamps:
        """Calls at this rate, each with its time."""

        def prepare(number: int) -> Callable[[], object]:
            return lambda: self._stamp.delay(number, PERIOD)

        return paced(range(first, first + count), per_second, prepare)

    def clean(self) -> None:
        """Empty the queue."""
        with self._app.connection_for_write() as connection:
            connection.default_channel.queue_purge("celery")

    def depth(self) -> int:
        """Messages in the queue."""
        with self._app.connection_for_write() as connection:
            return int(connection.default_channel.queue_declare("celery", passive=True)[1])


def _body(number: int, period: str) -> None:
    """Never run here."""
