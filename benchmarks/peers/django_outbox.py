"""django-celery-outbox: the web process, and the relay."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from benchmarks.peers.timing import PERIOD, Stamps, paced, seconds_of
from benchmarks.stage import Place


class Caller:
    """A web process that calls ``.delay()`` in ``transaction.atomic()``."""

    def __init__(self, place: Place) -> None:
        os.environ.update(place.environment)
        from django.core.management import call_command
        from django.db import transaction

        from benchmarks.programs import django_app

        self._atomic = transaction.atomic
        self._app = django_app
        call_command("migrate", verbosity=0)
        self.calls_in_transactions(1)
        self.clean()

    def calls_in_transactions(self, count: int) -> float:
        """So many times: begin, ``.delay()``, commit."""

        def work() -> None:
            for number in range(count):
                with self._atomic():
                    self._app.noop.delay(number, PERIOD)

        return seconds_of(work)

    def calls_in_one_transaction(self, count: int) -> float:
        """Begin, so many ``.delay()``, commit."""

        def work() -> None:
            with self._atomic():
                for number in range(count):
                    self._app.noop.delay(number, PERIOD)

        return seconds_of(work)

    def stamped(self, first: int, count: int, per_second: float) -> Stamps:
        """Transactions of one call at this rate, each with the time of its commit."""

        def prepare(number: int) -> Any:
            block = self._atomic()
            block.__enter__()
            self._app.stamp.delay(number, PERIOD)
            return lambda: block.__exit__(None, None, None)

        return paced(range(first, first + count), per_second, prepare)

    def clean(self) -> None:
        """Empty the table."""
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute("TRUNCATE celery_outbox")


class Relay(Caller):
    """Its relay, which is given a backlog.

    Arguments:
        options: of ``celery_outbox_relay``, by their names in Python.
    """

    def __init__(self, place: Place, options: dict[str, Any]) -> None:
        super().__init__(place)
        self._options = options

    def fill(self, count: int) -> None:
        """Make so many due rows, as so many calls would have made them."""
        from django.db import connection

        self.clean()
        self.calls_in_transactions(1)
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM celery_outbox LIMIT 0")
            names = [column.name for column in cursor.description if column.name != "id"]
            chosen = ["gen_random_uuid()::text" if name == "task_id" else name for name in names]
            cursor.execute(
                f"INSERT INTO celery_outbox ({', '.join(names)}) SELECT {', '.join(chosen)} "
                f"FROM celery_outbox CROSS JOIN generate_series(1, {count - 1})"
            )
            cursor.execute("VACUUM ANALYZE celery_outbox")
            cursor.execute("CHECKPOINT")

    def drain(self) -> float:
        """Publish everything; returns the seconds from the first message on: before it, the relay
        declares many exchanges and queues, which it does once."""
        from django_celery_outbox.models import CeleryOutbox
        from django_celery_outbox.relay import Relay as RunningRelay
        from django_celery_outbox.relay import RelayConfig
        from django_celery_outbox.signals import outbox_message_sent

        # Asked to stop while there is something to publish, it publishes that, and then returns.
        config = RelayConfig.init(shutdown_timeout=3600.0, idle_time=0.0, **self._options)
        relay = RunningRelay(self._app.app, config)
        began: list[float] = []

        def ask_to_stop(**_: Any) -> None:
            if not began:
                began.append(time.perf_counter())
                os.kill(os.getpid(), signal.SIGTERM)

        outbox_message_sent.connect(ask_to_stop, weak=False)
        before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            relay.start()
            ended = time.perf_counter()
        finally:
            outbox_message_sent.disconnect(ask_to_stop)
            for number, handler in before.items():
                signal.signal(number, handler)
        left = CeleryOutbox.objects.count()
        assert left == 0, f"{left} rows are left"
        return ended - began[0]

    def depth(self) -> int:
        """Messages in the queue."""
        with self._app.app.connection_for_write() as connection:
            return int(connection.default_channel.queue_declare("celery", passive=True)[1])

    def purge(self) -> None:
        """Empty the queue."""
        with self._app.app.connection_for_write() as connection:
            connection.default_channel.queue_purge("celery")
