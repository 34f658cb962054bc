"""Steps of Celery's worker: its heartbeat in the database, and the quarantine queue."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import bootsteps, signals
from celery.utils.nodenames import gethostname
from celery.worker import state

from celery_outbox.execute.forking import ForkGate
from celery_outbox.execute.past import warn_of_tasks_past_the_outbox
from celery_outbox.execute.storable import is_storable
from celery_outbox.log import cause, log_event
from celery_outbox.store import workers
from celery_outbox.store.patience import LONGEST_PAUSE
from celery_outbox.store.schema import MAX_JOB_ID

logger = logging.getLogger("celery_outbox.execute")

#: Seconds that a new pool process waits for a beat at most.
FORK_PATIENCE = 5.0

_forks = ForkGate(FORK_PATIENCE)

#: What ends a worker.
_SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)

#: Seconds that a worker which ends waits for its last heartbeat.
SIGN_OFF_TIMEOUT = 5.0


class Heartbeat(bootsteps.StartStopStep):
    """Keeps the leases of this worker's running jobs; one update per interval.

    It runs in the worker's main process, so a body that blocks, or holds the GIL for long,
    keeps its lease; the lease of a job whose pool process died is not extended, because
    Celery no longer counts that job as active.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Before the pool forks: every pool process has the same worker id.
        self._outbox = parent.app._celery_outbox
        self._worker_id = self._outbox.worker_id
        # A worker that has no database to look into must not start.
        _ = self._outbox.engine

    def start(self, parent: Any) -> None:
        """Enter the worker, and begin to beat."""
        warn_of_tasks_past_the_outbox(parent.app)
        self._thread = threading.Thread(target=self._run, name="outbox-heartbeat", daemon=True)
        self._thread.start()
        # Not with this step: Celery stops it before the pool, whose last jobs need their leases.
        signals.worker_shutdown.connect(self._sign_off)

    def _sign_off(self, **_: Any) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(SIGN_OFF_TIMEOUT)

    def _run(self) -> None:
        interval = self._outbox.config.heartbeat_interval
        # The leases that the beat before has extended end then.
        patience = self._outbox.config.lease - interval
        registered = False
        while True:
            try:
                if not registered:
                    with _forks:
                        self._outbox.database.write(self._register)
                    registered = True
                with _no_signals(), _forks:
                    self._outbox.database.write(self._beat, patience=patience)
                pause = interval
            except Exception as error:  # a thread that ends would let every lease end
                log_event(logger, logging.WARNING, "outbox.heartbeat_failed", error=cause(error))
                # Leases end meanwhile, and are lost to the first who looks afterwards.
                pause = min(interval, LONGEST_PAUSE)
            if self._stop.wait(pause):
                break
        try:
            self._outbox.database.write(
                lambda c: workers.sign_off(c, self._outbox.tables, self._worker_id)
            )
        except Exception:  # it ends anyway; the row is only a matter of tidiness
            log_event(logger, logging.WARNING, "outbox.sign_off_failed")

    def _register(self, connection: Any) -> None:
        workers.register(
            connection,
            self._outbox.tables,
            self._worker_id,
            hostname=gethostname(),
            pid=os.getpid(),
        )

    def _beat(self, connection: Any) -> None:
        # Celery forgets a request when its pool process is lost.
        running = _requests(state.active_requests) | _requests(state.reserved_requests)
        workers.beat(
            connection,
            self._outbox.tables,
            self._worker_id,
            running,
            lease=self._outbox.config.lease,
        )


@contextmanager
def _no_signals() -> Iterator[None]:
    """Keep this thread's signals until the end of the block.

    Under gevent it is the main thread: a shutdown that Celery begins in its signal handler, in the
    middle of the beat's transaction, would wait for the rows that the beat has locked, for ever.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHUTDOWN_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _requests(requests: Any) -> set[str]:
    """The ids in one of Celery's weak sets, which other threads change meanwhile."""
    for _ in range(100):
        try:
            # A task without the outbox may have any id, and has no lease.
            return {each.id for each in requests if is_storable(each.id, MAX_JOB_ID)}
        except RuntimeError:
            continue
    raise RuntimeError("Celery's set of requests does not hold still")


class DeclareQuarantine(bootsteps.StartStopStep):
    """Declares the quarantine queue: a rejected message is lost where its exchange is missing."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def start(self, parent: Any) -> None:
        """Declare it on the worker's own connection, which Celery makes again when it is lost."""
        queue = parent.app._celery_outbox.quarantine_queue
        with parent.connection.channel() as channel:
            try:
                queue(channel).declare()
            except parent.connection.channel_errors as error:
                # It exists with other arguments: whoever declared it is right.
                log_event(
                    logger,
                    logging.WARNING,
                    "outbox.declare_refused",
                    queue=queue.name,
                    error=type(error).__name__,
                )
