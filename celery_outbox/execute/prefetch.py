"""The prefetch count, given back after the worker's connection was lost."""

from __future__ import annotations

from typing import Any


def restore_in_the_loop(consumer: Any) -> None:
    """Have the consumer's own thread tell the broker how much to deliver.

    Celery lowers the count when it connects again, and raises it with each acknowledgement, in
    the thread that acknowledges: one of the pool's, with threads. That one then waits for the
    broker's answer on a connection that the consumer's thread reads from, too; whoever gets the
    answer, the other may wait for ever, and the worker lives on and consumes nothing.

    Arguments:
        consumer: Celery's, before it has made its handler of deliveries.
    """
    restore = consumer._restore_prefetch_count_after_connection_restart

    def in_the_loop(*args: Any) -> None:
        consumer.call_soon(restore, *args)

    consumer._restore_prefetch_count_after_connection_restart = in_the_loop
