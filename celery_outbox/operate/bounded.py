"""Work of the maintenance that may take as long as somebody else's server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.operate")

#: Seconds for which the maintenance waits: the result backend hears of failures, and may be away.
PATIENCE = 5.0


class Bounded:
    """Runs a work beside, and waits for it only so long; never twice at once.

    Arguments:
        work: returns how much it did.
        name: of the work, for threads and logs.
        patience: seconds.
    """

    def __init__(self, work: Callable[[], int], name: str, patience: float = PATIENCE) -> None:
        self._work = work
        self._name = name
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._done = 0

    def run(self) -> int:
        """Returns how much was done since the last call."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name=f"outbox-{self._name}", daemon=True
            )
            self._thread.start()
        self._thread.join(self._patience)
        done, self._done = self._done, 0
        return done

    def _run(self) -> None:
        try:
            self._done += self._work()
        except Exception:
            log_event(logger, logging.ERROR, f"outbox.{self._name}_failed", exc_info=True)
