"""Redis: kombu keeps what a worker has not acknowledged, and gives it back after a while."""

from __future__ import annotations

import time

from redis import Redis

from example_project.configuration import KEY_PREFIX, VISIBILITY_TIMEOUT
from example_project.play.broker import Broker
from example_project.play.patience import Patience


class RedisBroker(Broker):
    """Redis."""

    redelivery = f"Redis redelivers the message after visibility_timeout, {VISIBILITY_TIMEOUT} s."

    def clear(self) -> None:
        """Delete the keys that start with this example's prefix, and no others."""
        with self._client() as client:
            for key in client.scan_iter(f"{KEY_PREFIX}*"):
                client.delete(key)

    def redeliver(self, job_id: str, patience: Patience) -> None:
        """Wait until the message may be given back: the next worker does that when it starts."""

        def overdue() -> bool:
            latest = time.time() - VISIBILITY_TIMEOUT
            with self._client() as client:
                return bool(client.zrangebyscore(f"{KEY_PREFIX}unacked_index", 0, latest))

        patience.until("the end of Redis' visibility timeout", overdue)

    def _count(self, queue: str) -> int:
        # kombu's own count does not see lists under a key prefix.
        with self._client() as client:
            return int(client.llen(f"{KEY_PREFIX}{queue}"))

    def _client(self) -> Redis:
        return Redis.from_url(self.app.conf.broker_url)
