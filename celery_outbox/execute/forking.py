"""Keeps the pool from forking while another thread is inside the database's driver.

A fork copies every lock as it is, and the thread that would release it is not in the child. A
driver written in C has such locks (libpq holds one while it sets up a connection), so a child
that was forked at that moment would hang in its first connection, for ever.
"""

from __future__ import annotations

import os
import threading
from typing import Any


class ForkGate:
    """A block that no fork of this process falls into.

    Arguments:
        patience: seconds that a fork waits at most for the block to end.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._held = False
        os.register_at_fork(
            before=self._before, after_in_parent=self._after, after_in_child=self._renew
        )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc_info: Any) -> None:
        self._lock.release()

    def _before(self) -> None:
        self._held = self._lock.acquire(timeout=self._patience)

    def _after(self) -> None:
        if self._held:
            self._lock.release()

    def _renew(self) -> None:
        self._lock = threading.Lock()
