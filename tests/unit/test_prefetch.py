"""The prefetch count is restored by the thread that reads from the connection."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from celery_outbox.execute.prefetch import restore_in_the_loop


class Consumer:
    """As much of Celery's consumer as this needs."""

    def __init__(self) -> None:
        self.pending: deque[Callable[[], Any]] = deque()
        self.restored_by: list[int] = []

    def call_soon(self, call: Callable[..., Any], *args: Any) -> None:
        self.pending.append(partial(call, *args))

    def _restore_prefetch_count_after_connection_restart(self, *_: Any) -> None:
        self.restored_by.append(threading.get_ident())


def test_an_acknowledgement_in_a_pool_thread_leaves_the_broker_to_the_consumers_thread() -> None:
    consumer = Consumer()
    restore_in_the_loop(consumer)

    thread = threading.Thread(
        target=consumer._restore_prefetch_count_after_connection_restart, args=("the ack",)
    )
    thread.start()
    thread.join()
    before = list(consumer.restored_by)
    consumer.pending.popleft()()

    assert (before, consumer.restored_by) == ([], [threading.get_ident()])


def test_celery_still_restores_it_by_this_name() -> None:
    from celery.worker.consumer import Consumer as Celerys

    assert callable(Celerys._restore_prefetch_count_after_connection_restart)
