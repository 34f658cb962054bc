"""The broker as the demonstration sees it: how many messages lie in a queue."""

from __future__ import annotations

from celery import Celery

from celery_outbox import Outbox
from example_project.configuration import QUARANTINE_QUEUE, QUEUE
from example_project.play.patience import Patience


class Broker:
    """RabbitMQ; the base of the others."""

    #: What happens to the message of a worker that was killed before it acknowledged it.
    redelivery = "RabbitMQ redelivers the message by itself: the worker's connection is gone."

    def __init__(self, app: Celery, outbox: Outbox) -> None:
        self.app = app
        self._queues = (outbox.queue(QUEUE), outbox.quarantine_queue)

    def prepare(self) -> None:
        """Remove what an earlier demonstration left, and make the queues."""
        with self.app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=5)
            self.clear()
            for queue in self._queues:
                queue(connection.channel()).declare()

    def clear(self) -> None:
        """Remove this example's queues, and no others."""
        with self.app.connection_for_write() as connection:
            for queue in self._queues:
                queue(connection.channel()).delete()

    def waiting(self) -> int:
        """How many messages wait for a worker."""
        return self._count(QUEUE)

    def quarantined(self) -> int:
        """How many messages lie in the quarantine queue."""
        return self._count(QUARANTINE_QUEUE)

    def redeliver(self, job_id: str, patience: Patience) -> None:
        """Wait until the broker gives the message of a killed worker to the next one."""

    def _count(self, queue: str) -> int:
        with self.app.connection_for_read() as connection:
            try:
                found = connection.default_channel.queue_declare(queue, passive=True)
            except connection.channel_errors:
                # In Redis an empty queue does not exist.
                return 0
            return int(found.message_count)
