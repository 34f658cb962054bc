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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from celery import Celery
from celery.utils.nodenames import gethostname
from kombu import Queue
from kombu.serialization import prepare_accept_content
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.config import Config
from celery_outbox.core.backoff import Backoff
from celery_outbox.core.dispatching import Obsolete, Overdue, Postpone, Publish, plan
from celery_outbox.core.reasons import Reason
from celery_outbox.dispatch.amqp import AmqpPublisher
from celery_outbox.dispatch.kombu import KombuPublisher
from celery_outbox.dispatch.publisher import Outcome, Publisher, Report
from celery_outbox.dispatch.wakeup import Wakeup, open_wakeup
from celery_outbox.dispatch.wire import JSON, Wire, build
from celery_outbox.exceptions import SchemaError
from celery_outbox.log import cause as describe
from celery_outbox.log import log_event
from celery_outbox.queues import is_rabbitmq
from celery_outbox.store import messages, publishing
from celery_outbox.store.clock import db_after
from celery_outbox.store.database import Database
from celery_outbox.store.messages import Message
from celery_outbox.store.rerun import is_transient

logger = logging.getLogger("celery_outbox.dispatch")

#: Seconds of the first pause in an outage.
FIRST_PAUSE = 0.2
#: Seconds that an idle dispatcher waits at least.
SHORTEST_WAIT = 0.02
#: Seconds after which a message that the broker would not take this time is sent again.
NACK_DELAY = 5.0

_REASONS = {
    Outcome.UNROUTABLE: Reason.UNROUTABLE,
    Outcome.TOO_LARGE: Reason.TOO_LARGE,
    Outcome.UNPUBLISHABLE: Reason.UNPUBLISHABLE,
}


@dataclass
class Pass:
    """What one batch came to.

    Attributes:
        claimed: rows that were taken.
        published: rows that the broker confirmed and the database marked.
        refused: rows whose job went to quarantine.
        outage: why the broker could not be used, or ``None``.
    """

    claimed: int = 0
    published: int = 0
    refused: int = 0
    outage: BaseException | None = None


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
                            self._wakeup.wait(self._idle_seconds(maintain_at))
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
        batch = self._database.write(
            lambda connection: messages.claim(
                connection,
                self._tables,
                claim=claim,
                lease=self._config.dispatch_lease,
                limit=self._config.dispatch_batch,
            )
        )
        if not batch:
            return Pass()
        wires, broken = self._sort_out(batch, claim)
        report = self._ready_publisher().publish(wires) if wires else Report()
        report.outcomes.update(dict.fromkeys(broken, Outcome.UNPUBLISHABLE))
        return self._settle(batch, wires, report, claim)

    def _sort_out(self, batch: Sequence[Message], claim: str) -> tuple[list[Wire], list[int]]:
        """The messages to send, and the rows that cannot be read; the rest is settled here."""
        wires: list[Wire] = []
        broken: list[int] = []
        aside: list[tuple[Message, Obsolete | Postpone | Overdue]] = []
        for message in batch:
            step = plan(
                is_copy=message.kind == messages.QUARANTINE,
                state=message.state,
                leased_until=message.leased_until,
                expires_at=message.expires_at,
                now=message.now,
            )
            if not isinstance(step, Publish):
                aside.append((message, step))
                continue
            try:
                wires.append(build(message, self._quarantine, self._accepts_json))
            except (ValueError, TypeError, KeyError, AttributeError):
                log_event(
                    logger,
                    logging.ERROR,
                    "outbox.unreadable_row",
                    exc_info=True,
                    job=message.job_id,
                )
                broken.append(message.id)
        if aside:
            self._database.write(lambda connection: self._set_aside(connection, aside, claim))
        return wires, broken

    def _set_aside(
        self,
        connection: Connection,
        aside: Sequence[tuple[Message, Obsolete | Postpone | Overdue]],
        claim: str,
    ) -> None:
        for message, step in aside:
            if isinstance(step, Postpone):
                # One row that waits for the end of a lease is enough.
                if messages.has_pending(connection, self._tables, message.job_id):
                    messages.drop(connection, self._tables, [message.id], claim)
                else:
                    messages.release(
                        connection, self._tables, [message.id], claim, due_at=step.until
                    )
            elif isinstance(step, Overdue):
                publishing.expire(connection, self._tables, message, claim, actor=self.name)
            else:
                messages.drop(connection, self._tables, [message.id], claim)

    def _settle(
        self, batch: Sequence[Message], wires: Sequence[Wire], report: Report, claim: str
    ) -> Pass:
        done = Pass(claimed=len(batch), outage=report.outage)
        by_outcome: dict[Outcome, list[Message]] = {}
        undecided: list[Message] = []
        sent = {wire.id for wire in wires} | set(report.outcomes)
        for message in batch:
            if message.id not in sent:
                continue
            outcome = report.outcomes.get(message.id)
            if outcome is None:
                undecided.append(message)
            else:
                by_outcome.setdefault(outcome, []).append(message)
        confirmed = by_outcome.pop(Outcome.CONFIRMED, [])
        if confirmed:
            marked = self._database.write(
                lambda c: publishing.mark(c, self._tables, confirmed, claim, actor=self.name)
            )
            done.published = len(marked)
            log_event(logger, logging.INFO, "outbox.published", count=len(marked))
        self._give_back(undecided, claim, 0.0)
        self._give_back(by_outcome.pop(Outcome.NACKED, []), claim, NACK_DELAY)
        for outcome, refused in by_outcome.items():
            for message in refused:
                self._refuse(message, _REASONS[outcome], claim)
                done.refused += 1
        return done

    def _give_back(self, undecided: Sequence[Message], claim: str, delay: float) -> None:
        if not undecided:
            return
        ids = [message.id for message in undecided]
        self._database.write(
            lambda c: messages.release(c, self._tables, ids, claim, due_at=db_after(delay))
        )
        if delay:
            log_event(logger, logging.WARNING, "outbox.nacked", count=len(ids))

    def _refuse(self, message: Message, reason: Reason, claim: str) -> None:
        log_event(logger, logging.ERROR, "outbox.refused", job=message.job_id, reason=str(reason))
        if message.kind == messages.QUARANTINE:
            # The job is in quarantine already; its copy waits until the broker takes it.
            self._give_back([message], claim, self._config.backoff_max)
            return
        self._database.write(
            lambda c: publishing.refuse(c, self._tables, message, reason, claim, actor=self.name)
        )

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
