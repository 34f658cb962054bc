"""The dispatcher's loop: claim a batch, commit, publish, mark, commit."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import threading
import time
import uuid
from typing import Any, Protocol

from celery import Celery
from celery.utils.nodenames import gethostname
from kombu import Queue
from kombu.serialization import prepare_accept_content
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.config import Config
from celery_outbox.core.backoff import Backoff
from celery_outbox.dispatch.amqp import AmqpPublisher
from celery_outbox.dispatch.batch import Batch, Pass
from celery_outbox.dispatch.kombu import KombuPublisher
from celery_outbox.dispatch.publisher import Outcome, Publisher, Report
from celery_outbox.dispatch.wakeup import Wakeup, open_wakeup
from celery_outbox.dispatch.wire import JSON
from celery_outbox.exceptions import SchemaError
from celery_outbox.log import cause as describe
from celery_outbox.log import log_event
from celery_outbox.queues import is_rabbitmq
from celery_outbox.store import messages
from celery_outbox.store.database import Database
from celery_outbox.store.rerun import is_transient

logger = logging.getLogger("celery_outbox.dispatch")

#: Seconds of the first pause in an outage.
FIRST_PAUSE = 0.2
#: Seconds that an idle dispatcher waits at least.
SHORTEST_WAIT = 0.02


class Maintainer(Protocol):
    """What a dispatcher lets do the maintenance, between two batches."""

    def run(self, *, keep: bool = False) -> Any:
        """Do what is due, unless somebody else does; stay the one who does it with ``keep``."""

    def release(self) -> None:
        """Let somebody else do it from now on."""


class Dispatcher:
    """Publishes the outbox of one app; any number may run side by side.

    Arguments:
        app: the Celery app.
        config: the settings.
        database: the outbox tables.
        quarantine: the quarantine queue.
        maintenance: has a run every ``maintenance_interval`` seconds.
    """

    def __init__(
        self,
        app: Celery,
        config: Config,
        database: Database,
        *,
        quarantine: Queue,
        maintenance: Maintainer,
    ) -> None:
        self.name = f"dispatcher:{gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._app = app
        self._config = config
        self._database = database
        self._tables = database.tables
        self._quarantine = quarantine
        self._maintenance = maintenance
        self._publisher: Publisher | None = None
        accepted = prepare_accept_content(app.conf.accept_content)
        self._accepts_json = accepted is None or JSON in accepted
        self._claims = itertools.count(1)
        self._stop = threading.Event()
        self._wakeup: Wakeup | None = None

    def stop(self) -> None:
        """End :meth:`run` after the batch in flight; may be called in a signal handler."""
        self._stop.set()
        if self._wakeup is not None:
            self._wakeup.set()

    def run(self) -> None:
        """Publish what is due, and wait for more, until :meth:`stop` is called.

        Raises:
            SchemaError: the tables are missing or have another version.
        """
        backoff = Backoff(FIRST_PAUSE, self._config.backoff_max)
        maintain_at = time.monotonic()
        #: When the database last answered; before the first answer it may have been away for long.
        answered_at = -math.inf
        database = self._database
        self._wakeup = open_wakeup(
            database.engine, self._tables.channel, self._config.notify, database.limit_driver
        )
        log_event(logger, logging.INFO, "outbox.dispatcher_started", dispatcher=self.name)
        try:
            while not self._stop.is_set():
                try:
                    if time.monotonic() >= maintain_at:
                        maintain_at = time.monotonic() + self._config.maintenance_interval
                        self._maintenance.run(keep=True)
                    done = self.dispatch_batch()
                    answered_at = time.monotonic()
                    if done.outage is None:
                        backoff.reset()
                        if done.claimed == 0:
                            self._wakeup.doze()
                            self._wakeup.wait(self._idle_seconds(maintain_at))
                        else:
                            self._wakeup.rise()
                        continue
                    trouble: BaseException = done.outage
                except SchemaError:
                    raise
                except SQLAlchemyError as error:
                    trouble = error
                    silent = time.monotonic() - answered_at
                    if is_transient(error) and silent >= self._config.heartbeat_interval:
                        # Workers could not tell that they live, either. Before their jobs are taken
                        # back, they get the time of a lease for it. Not for each short trouble:
                        # with one every now and then, no job would ever be taken back.
                        maintain_at = time.monotonic() + self._config.lease
                except Exception as error:
                    # The rows come back when the dispatcher's lease ends; one that does this
                    # each time must not end the daemon for all the others.
                    log_event(logger, logging.ERROR, "outbox.dispatch_failed", exc_info=True)
                    trouble = error
                pause = backoff.next(random.random())
                log_event(
                    logger,
                    logging.WARNING,
                    "outbox.dispatch_paused",
                    error=describe(trouble),
                    pause=round(pause, 2),
                )
                self._stop.wait(pause)
        finally:
            self.close()
            self._leave_maintenance()
            log_event(logger, logging.INFO, "outbox.dispatcher_stopped", dispatcher=self.name)

    def drain(self, *, seconds: float | None = None) -> Pass:
        """Publish what is due, until nothing is or an outage ends it; does not wait for more.

        Arguments:
            seconds: stop after the batch in which this time is over; ``None``: no limit.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.SQLAlchemyError: the database is away.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        total = Pass()
        try:
            while not self._stop.is_set():
                done = self.dispatch_batch()
                total.claimed += done.claimed
                total.published += done.published
                total.refused += done.refused
                total.outage = done.outage
                if done.claimed == 0 or done.outage is not None:
                    break
                if deadline is not None and time.monotonic() >= deadline:
                    break
            return total
        finally:
            self.close()

    def close(self) -> None:
        """Let go of the broker and of the wake-up connection."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._wakeup is not None:
            self._wakeup.close()

    def _leave_maintenance(self) -> None:
        try:
            self._maintenance.release()
        except (SQLAlchemyError, SchemaError):
            # Another dispatcher takes it over when nothing is heard of this one.
            log_event(logger, logging.WARNING, "outbox.release_failed", dispatcher=self.name)

    def dispatch_batch(self) -> Pass:
        """Claim, publish and mark one batch.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database is away; what was claimed is free
                again when the dispatcher's lease ends.
        """
        claim = f"{self.name}:{next(self._claims)}"
        claimed = self._database.write_in_one(
            lambda connection: messages.claim(
                connection,
                self._tables,
                claim=claim,
                lease=self._config.dispatch_lease,
                limit=self._config.dispatch_batch,
            )
        )
        if not claimed:
            return Pass()
        batch = Batch(self._database, claimed, claim, self.name, self._config.backoff_max)
        wires, broken = batch.sort_out(self._quarantine, self._accepts_json)
        report = self._ready_publisher().publish(wires) if wires else Report()
        report.outcomes.update(dict.fromkeys(broken, Outcome.UNPUBLISHABLE))
        return batch.settle(wires, report)

    def _idle_seconds(self, maintain_at: float) -> float:
        """How long to wait when nothing is due: until something is, or may be."""
        due = self._database.read(lambda c: messages.seconds_until_due(c, self._tables))
        longest = min(self._config.poll_interval, maintain_at - time.monotonic())
        # A row that is due and was not claimed is locked by somebody; do not spin on it.
        return max(min(longest, due if due is not None else longest), SHORTEST_WAIT)

    def _ready_publisher(self) -> Publisher:
        if self._publisher is None:
            if is_rabbitmq(self._app):
                self._publisher = AmqpPublisher(
                    self._app,
                    window=self._config.dispatch_window,
                    timeout=self._config.publish_timeout,
                    quarantine=self._quarantine,
                )
            else:
                self._publisher = KombuPublisher(
                    self._app, timeout=self._config.publish_timeout, quarantine=self._quarantine
                )
        return self._publisher
