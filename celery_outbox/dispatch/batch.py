"""One batch of the dispatcher: what of it is sent, and what each message came to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kombu import Queue
from sqlalchemy import Connection

from celery_outbox.core.dispatching import Obsolete, Overdue, Postpone, Publish, plan
from celery_outbox.core.reasons import Reason
from celery_outbox.dispatch.publisher import Outcome, Report
from celery_outbox.dispatch.wire import Wire, build
from celery_outbox.log import log_event
from celery_outbox.store import messages, publishing
from celery_outbox.store.clock import db_after
from celery_outbox.store.database import Database
from celery_outbox.store.messages import Message

logger = logging.getLogger("celery_outbox.dispatch")

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


@dataclass(frozen=True)
class Batch:
    """Rows that a dispatcher has claimed together.

    Attributes:
        database: the outbox tables.
        messages: the rows, as they were claimed.
        claim: the name of the claim, which every write about the rows gives.
        actor: the dispatcher, for the journal.
        copy_delay: seconds after which a copy that the broker refused is sent again.
    """

    database: Database
    messages: Sequence[Message]
    claim: str
    actor: str
    copy_delay: float

    def sort_out(self, quarantine: Queue, accepts_json: bool) -> tuple[list[Wire], list[int]]:
        """The messages to send, and the rows that cannot be read; the rest is settled here.

        Arguments:
            quarantine: where copies of failed jobs' messages go.
            accepts_json: whether the app's workers read JSON.
        """
        wires: list[Wire] = []
        broken: list[int] = []
        aside: list[tuple[Message, Obsolete | Postpone | Overdue]] = []
        for message in self.messages:
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
                wires.append(build(message, quarantine, accepts_json))
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
            self.database.write(lambda connection: self._set_aside(connection, aside))
        return wires, broken

    def settle(self, wires: Sequence[Wire], report: Report) -> Pass:
        """Write down what became of the messages.

        Arguments:
            wires: those that were to be sent.
            report: what the publisher says of them, and of rows that could not be read.
        """
        done = Pass(claimed=len(self.messages), outage=report.outage)
        by_outcome: dict[Outcome, list[Message]] = {}
        undecided: list[Message] = []
        sent = {wire.id for wire in wires} | set(report.outcomes)
        for message in self.messages:
            if message.id not in sent:
                continue
            outcome = report.outcomes.get(message.id)
            if outcome is None:
                undecided.append(message)
            else:
                by_outcome.setdefault(outcome, []).append(message)
        confirmed = by_outcome.pop(Outcome.CONFIRMED, [])
        if confirmed:
            # Jobs of other services end with it: then it is more than one statement.
            relayed = any(message.relay for message in confirmed)
            write = self.database.write if relayed else self.database.write_in_one
            marked = write(
                lambda connection: publishing.mark(
                    connection, self.database.tables, confirmed, self.claim, actor=self.actor
                )
            )
            done.published = len(marked)
            log_event(logger, logging.INFO, "outbox.published", count=len(marked))
        self._give_back(undecided, 0.0)
        self._give_back(by_outcome.pop(Outcome.NACKED, []), NACK_DELAY)
        for outcome, refused in by_outcome.items():
            for message in refused:
                self._refuse(message, _REASONS[outcome])
                done.refused += 1
        return done

    def _set_aside(
        self,
        connection: Connection,
        aside: Sequence[tuple[Message, Obsolete | Postpone | Overdue]],
    ) -> None:
        tables, claim = self.database.tables, self.claim
        for message, step in aside:
            if isinstance(step, Postpone):
                # One row that waits for the end of a lease is enough.
                if messages.has_pending(connection, tables, message.job_id):
                    messages.drop(connection, tables, [message.id], claim)
                else:
                    messages.release(connection, tables, [message.id], claim, due_at=step.until)
            elif isinstance(step, Overdue):
                publishing.expire(connection, tables, message, claim, actor=self.actor)
            else:
                messages.drop(connection, tables, [message.id], claim)

    def _give_back(self, undecided: Sequence[Message], delay: float) -> None:
        if not undecided:
            return
        ids = [message.id for message in undecided]
        self.database.write(
            lambda connection: messages.release(
                connection, self.database.tables, ids, self.claim, due_at=db_after(delay)
            )
        )
        if delay:
            log_event(logger, logging.WARNING, "outbox.nacked", count=len(ids))

    def _refuse(self, message: Message, reason: Reason) -> None:
        log_event(logger, logging.ERROR, "outbox.refused", job=message.job_id, reason=str(reason))
        if message.kind == messages.QUARANTINE:
            # The job is in quarantine already; its copy waits until the broker takes it.
            self._give_back([message], self.copy_delay)
            return
        self.database.write(
            lambda connection: publishing.refuse(
                connection, self.database.tables, message, reason, self.claim, actor=self.actor
            )
        )
