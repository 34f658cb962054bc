"""pgqueuer, with its synchronous driver for psycopg."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import psycopg
from pgqueuer.db import AsyncpgDriver, SyncPsycopgDriver
from pgqueuer.queries import Queries, SyncQueries

from benchmarks.peers.timing import PERIOD, Stamps, paced, seconds_of
from benchmarks.stage import Place


class Caller:
    """A web process that enqueues jobs."""

    def __init__(self, place: Place) -> None:
        asyncio.run(_install(place.libpq))
        # It insists on autocommit; transactions are begun by hand.
        self._connection = psycopg.connect(place.libpq, autocommit=True)
        self._queries = SyncQueries(SyncPsycopgDriver(self._connection))
        self.calls_in_transactions(1)
        self.clean()

    def calls_in_transactions(self, count: int) -> float:
        """So many times ``enqueue``, each a transaction of its own."""

        def work() -> None:
            for number in range(count):
                self._queries.enqueue("bench.noop", _payload(number))

        return seconds_of(work)

    def calls_in_one_transaction(self, count: int) -> float:
        """Begin, so many times ``enqueue``, commit."""

        def work() -> None:
            with self._connection.transaction():
                for number in range(count):
                    self._queries.enqueue("bench.noop", _payload(number))

        return seconds_of(work)

    def bulk(self, count: int) -> float:
        """``enqueue`` of a list of so many jobs."""

        def work() -> None:
            payloads: list[bytes | None] = [_payload(number) for number in range(count)]
            self._queries.enqueue(["bench.noop"] * count, payloads, [0] * count)

        return seconds_of(work)

    def stamped(self, first: int, count: int, per_second: float) -> Stamps:
        """Transactions of one call at this rate, each with the time of its commit."""

        def prepare(number: int) -> Any:
            self._connection.execute("BEGIN")
            self._queries.enqueue("bench.stamp", _payload(number))
            return lambda: self._connection.execute("COMMIT")

        return paced(range(first, first + count), per_second, prepare)

    def clean(self) -> None:
        """Empty the tables."""
        self._connection.execute("TRUNCATE pgqueuer, pgqueuer_log")


async def _install(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await Queries(AsyncpgDriver(connection)).install()
    finally:
        await connection.close()


def _payload(number: int) -> bytes:
    return json.dumps({"number": number, "period": PERIOD}).encode()
