"""procrastinate, with its synchronous connector for psycopg."""

from __future__ import annotations

from typing import Any

import psycopg
from procrastinate import App, SyncPsycopgConnector

from benchmarks.peers.timing import PERIOD, Stamps, paced, seconds_of
from benchmarks.stage import Place


class Caller:
    """A web process that defers jobs on its own connection, so in its own transaction."""

    def __init__(self, place: Place) -> None:
        app = App(connector=SyncPsycopgConnector(conninfo=place.libpq))
        app.open()
        app.schema_manager.apply_schema()
        self._noop = app.task(name="bench.noop")(_body)
        self._stamp = app.task(name="bench.stamp")(_body)
        self._connection = psycopg.connect(place.libpq)
        self.calls_in_transactions(1)
        self.clean()

    def calls_in_transactions(self, count: int) -> float:
        """So many times: begin, ``defer``, commit."""

        def work() -> None:
            for number in range(count):
                self._defer(self._noop, number)
                self._connection.commit()

        return seconds_of(work)

    def calls_in_one_transaction(self, count: int) -> float:
        """Begin, so many times ``defer``, commit."""

        def work() -> None:
            for number in range(count):
                self._defer(self._noop, number)
            self._connection.commit()

        return seconds_of(work)

    def bulk(self, count: int) -> float:
        """``batch_defer`` of so many jobs, in a transaction of its own."""
        return seconds_of(
            lambda: self._noop.batch_defer(
                *({"number": number, "period": PERIOD} for number in range(count))
            )
        )

    def stamped(self, first: int, count: int, per_second: float) -> Stamps:
        """Transactions of one call at this rate, each with the time of its commit."""

        def prepare(number: int) -> Any:
            self._defer(self._stamp, number)
            return self._connection.commit

        return paced(range(first, first + count), per_second, prepare)

    def clean(self) -> None:
        """Empty the tables."""
        self._connection.execute("TRUNCATE procrastinate_jobs CASCADE")
        self._connection.commit()

    def _defer(self, task: Any, number: int) -> None:
        task.configure(connection=self._connection).defer(number=number, period=PERIOD)


def _body(number: int, period: str) -> None:
    """Never run here."""
