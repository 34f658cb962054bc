"""Many recorders at the same time."""

from __future__ import annotations

import threading
import time
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from benchmarks import backlog
from benchmarks.peers import order
from benchmarks.peers.ours import body, make_app
from benchmarks.peers.timing import PERIOD
from benchmarks.stage import Place
from celery_outbox import Outbox


class Crowd:
    """One process of several threads that record.

    Arguments:
        threads: each with a connection of its own.
        calls: whether a transaction makes a call, beside its row.
        settings: ``outbox_*`` settings that are not the defaults.
    """

    def __init__(self, place: Place, threads: int, calls: bool, settings: dict[str, Any]) -> None:
        self._outbox = Outbox(make_app(place, settings))
        self._outbox.init()
        self._noop = self._outbox.app.task(name="bench.noop")(body)
        self._threads = threads
        self._calls = calls
        engine = create_engine(place.database, pool_size=threads)
        order.create(engine)
        self._session = sessionmaker(engine)
        self._engine = engine
        self.commits(0.2)

    def commits(self, seconds: float) -> int:
        """Commit for so long; returns how many transactions there were."""
        done = [0] * self._threads
        errors: list[BaseException] = []
        end = time.monotonic() + seconds

        def work(mine: int) -> None:
            try:
                while time.monotonic() < end:
                    self._one(done[mine])
                    done[mine] += 1
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=work, args=(each,), daemon=True)
            for each in range(self._threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
            assert not thread.is_alive(), "a recorder does not end"
        if errors:
            raise errors[0]
        return sum(done)

    def clean(self) -> None:
        """Empty the tables."""
        with self._engine.begin() as connection:
            connection.execute(text("TRUNCATE shop_order"))
            backlog.clear(connection, self._outbox.tables)

    def _one(self, number: int) -> None:
        with self._session.begin() as session, self._outbox.use(session):
            session.add(order.new(number))
            if self._calls:
                self._noop.delay(number, PERIOD)
