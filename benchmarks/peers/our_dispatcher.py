"""celery-outbox: the dispatcher."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sqlalchemy import text

from benchmarks import backlog
from benchmarks.peers.ours import body, make_app
from benchmarks.peers.timing import PERIOD, seconds_of
from benchmarks.stage import Place
from celery_outbox import Outbox

#: Rows that one statement makes.
PORTION = 1_000_000


class Dispatcher:
    """A dispatcher with a backlog."""

    def __init__(self, place: Place, settings: dict[str, Any] | None = None) -> None:
        self.app = make_app(place, settings or {})
        self.outbox = Outbox(self.app)
        self.outbox.init()
        self._noop = self.app.task(name="bench.noop")(body)

    def fill(self, count: int, final: int = 0) -> None:
        """Make so many due rows, as so many calls would have made them.

        Arguments:
            final: jobs that have ended, beside them.
        """
        engine, tables = self.outbox.engine, self.outbox.tables
        with engine.begin() as connection, self.outbox.use(connection):
            backlog.clear(connection, tables)
            result = self._noop.delay(0, PERIOD)
            self.outbox.write(connection)
            backlog.multiply(connection, tables, result.id, count)
            for start in range(0, final, PORTION):
                portion = min(PORTION, final - start)
                backlog.add_final(connection, tables, result.id, portion, prefix=f"{start}-")
        backlog.settle(engine)

    def publish_again(self) -> None:
        """Make what is published due again, as if it never had been."""
        with self.outbox.engine.begin() as connection:
            backlog.unpublish(connection, self.outbox.tables)
        backlog.settle(self.outbox.engine)

    def publish_one(self) -> str:
        """Publish one job; returns its id."""
        self.fill(1)
        self.drain()
        with self.outbox.engine.connect() as connection:
            job = self.outbox.tables.job.name
            return str(connection.execute(text(f"SELECT id FROM {job}")).scalar_one())

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

    def publish(self, at_least: int) -> int:
        """Publish batches until there are so many messages; returns how many."""
        dispatcher = self.outbox.dispatcher()
        published = 0
        try:
            while published < at_least:
                done = dispatcher.dispatch_batch()
                assert done.published, done
                published += done.published
        finally:
            dispatcher.close()
        return published

    def reconnect(self) -> None:
        """Use new connections to the database from now on."""
        self.outbox.engine.dispose()

    def unpublished(self) -> int:
        """Rows that are not marked as published."""
        return self._count(self.outbox.tables.message.name, "published_at IS NULL")

    def succeeded(self) -> int:
        """Jobs that have succeeded."""
        return self._count(self.outbox.tables.job.name, "state = 'succeeded'")

    def depth(self) -> int:
        """Messages in the broker's queue."""
        with self.app.connection_for_read() as connection, connection.channel() as channel:
            return int(channel.queue_declare("celery", passive=True).message_count)

    def purge(self) -> None:
        """Empty the broker's queue, if there is one."""
        with (
            self.app.connection_for_write() as connection,
            suppress(*connection.channel_errors),
            connection.channel() as channel,
        ):
            channel.queue_purge("celery")

    def _count(self, table: str, where: str) -> int:
        statement = text(f"SELECT count(*) FROM {table} WHERE {where}")
        with self.outbox.engine.connect() as connection:
            return int(connection.execute(statement).scalar_one())
