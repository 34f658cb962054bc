"""Takes back what silent workers hold, and ends what has expired."""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from celery.utils.nodenames import gethostname
from sqlalchemy import Connection

from celery_outbox.core.classification import Verdict
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryIn, RetryPolicy, after_failure
from celery_outbox.core.states import State
from celery_outbox.log import log_event
from celery_outbox.store import job as jobs
from celery_outbox.store import journal, locks, quarantining, republishing, transitions
from celery_outbox.store.database import Database
from celery_outbox.store.job import Job

Result = TypeVar("Result")

logger = logging.getLogger("celery_outbox.operate")

#: Jobs that one transaction takes back: short enough that nobody waits for it.
BATCH = 100

_LOST = Verdict(False, str(Reason.LOST_WORKER), reason=Reason.LOST_WORKER)


@dataclass
class Maintained:
    """What a run did.

    Attributes:
        rescued: jobs of silent workers that get another attempt.
        quarantined: jobs of silent workers that had no attempt left.
        expired: waiting jobs whose time was over.
        republished: waiting jobs whose message was lost, or so it seems.
        counted: members of chords that had ended with nobody to count them.
        reported: ends of jobs that Celery's side was told of, because no worker does.
        left_to: who does the maintenance at this time, if it is somebody else.
    """

    rescued: int = 0
    quarantined: int = 0
    expired: int = 0
    republished: int = 0
    counted: int = 0
    reported: int = 0
    left_to: str | None = None


class NotOurs(Exception):
    """Somebody else does the maintenance."""


class Maintenance:
    """The maintenance of one outbox: of all that may do it, one at a time does.

    Arguments:
        database: the outbox tables.
        policy_of: returns how jobs of a task are retried.
        queue_depth: returns how many messages a queue of the broker holds, or ``None`` where the
            broker does not say.
        republish_after: seconds after which a published and unclaimed message counts as lost.
        lease: seconds after which another one takes over from one that fell silent.
        count_members: counts members of chords that nobody has counted; returns how many.
        report: tells Celery's side of ends that no worker tells of; returns of how many.
    """

    def __init__(
        self,
        database: Database,
        *,
        policy_of: Callable[[str], RetryPolicy],
        queue_depth: Callable[[str], int | None],
        republish_after: float,
        lease: float,
        count_members: Callable[[], int] = lambda: 0,
        report: Callable[[], int] = lambda: 0,
    ) -> None:
        self._report = report
        self._count_members = count_members
        self._database = database
        self._tables = database.tables
        self._policy_of = policy_of
        self._queue_depth = queue_depth
        self._republish_after = republish_after
        self._republish_at = time.monotonic()
        self._lease = lease
        self._actor = f"maintenance:{gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    def run(self, *, keep: bool = False) -> Maintained:
        """Do everything that is due now, unless somebody else does.

        Arguments:
            keep: stay the one who does it, for further runs, until :meth:`release` or until
                nothing has been heard for the lease.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.SQLAlchemyError: the database is away.
        """
        done = Maintained()
        done.left_to = self._database.read(self._other)
        if done.left_to is not None:
            return done
        try:
            self._run(done)
            if not keep:
                self.release()
        except NotOurs:
            done.left_to = self._database.read(self._other)
        if done != Maintained(left_to=done.left_to):
            log_event(
                logger,
                logging.INFO,
                "outbox.maintained",
                rescued=done.rescued,
                quarantined=done.quarantined,
                expired=done.expired,
                republished=done.republished,
                counted=done.counted,
                reported=done.reported,
            )
        return done

    def release(self) -> None:
        """Let somebody else do it from now on."""
        self._database.write(
            lambda c: locks.release(c, self._tables, locks.MAINTENANCE, holder=self._actor)
        )

    def _run(self, done: Maintained) -> None:
        self._rescue_all(done)
        self._expire_all(done)
        done.reported += self._report()
        done.counted += self._count_members()
        # It looks at every job that waits, so it is not done each time.
        if time.monotonic() >= self._republish_at:
            self._republish_at = time.monotonic() + self._republish_after / 10
            self._republish(done)

    def _other(self, connection: Connection) -> str | None:
        holder = locks.holder_of(connection, self._tables, locks.MAINTENANCE)
        return None if holder == self._actor else holder

    def _as_holder(self, work: Callable[[Connection], Result]) -> Result:
        """Run ``work`` in a transaction, as the one who does the maintenance.

        Raises:
            NotOurs: somebody else has become that.
        """

        def held(connection: Connection) -> Result:
            if not locks.hold(
                connection,
                self._tables,
                locks.MAINTENANCE,
                holder=self._actor,
                ttl=self._lease,
            ):
                raise NotOurs
            return work(connection)

        return self._database.write(held)

    def _rescue_all(self, done: Maintained) -> None:
        found = BATCH
        while found == BATCH:
            found, rescued, quarantined = self._as_holder(self._rescue)
            done.rescued += rescued
            done.quarantined += quarantined

    def _rescue(self, connection: Connection) -> tuple[int, int, int]:
        found = jobs.lock_expired(connection, self._tables, BATCH)
        ends = [self._take_back(connection, job) for job in found]
        return len(found), ends.count(State.RETRYING), ends.count(State.QUARANTINED)

    def _take_back(self, connection: Connection, job: Job) -> State | None:
        """End the attempt of a silent worker; returns the job's state, or ``None``: it is the
        job of somebody else by now."""
        step = after_failure(
            _LOST,
            attempt=job.attempt,
            max_attempts=job.max_attempts,
            attempts_before=job.attempts_before,
            policy=self._policy_of(job.task),
            random=random.random(),
        )
        if isinstance(step, RetryIn):
            took = transitions.rescue(
                connection, self._tables, job, actor=self._actor, delay=step.delay
            )
            return State.RETRYING if took else None
        took = quarantining.quarantine(
            connection,
            self._tables,
            job.id,
            job.lease_token,
            attempt=job.attempt,
            actor=self._actor,
            reason=step.reason,
            error_code=str(Reason.LOST_WORKER),
            # There may be no message left that a worker could reject.
            copy=True,
            # Nor one that a worker would tell Celery's side of.
            report=True,
        )
        return State.QUARANTINED if took else None

    def _expire_all(self, done: Maintained) -> None:
        found = BATCH
        while found == BATCH:
            found, expired = self._as_holder(self._expire)
            done.expired += expired

    def _expire(self, connection: Connection) -> tuple[int, int]:
        found = jobs.lock_overdue(connection, self._tables, BATCH)
        return len(found), sum(self._end_overdue(connection, job) for job in found)

    def _end_overdue(self, connection: Connection, job: Job) -> bool:
        return transitions.expire(
            connection, self._tables, job.id, attempt=job.attempt, actor=self._actor
        )

    def _republish(self, done: Maintained) -> None:
        """Send again what a broker took and no worker got: a message can be lost there.

        A duplicate is harmless, but a queue that is merely slow must not be filled with them: as
        many as the queue still holds are left alone.
        """
        after = self._republish_after
        queues = self._as_holder(lambda c: republishing.unclaimed_queues(c, self._tables, after))
        for queue, waiting in queues:
            depth = None if queue is None else self._queue_depth(queue)
            if queue is not None and depth is None:
                continue
            missing = waiting - (depth or 0)
            while missing > 0:
                again = partial(self._publish_again, queue=queue, limit=min(missing, BATCH))
                count = self._as_holder(again)
                done.republished += count
                missing = missing - count if count == BATCH else 0

    def _publish_again(self, connection: Connection, queue: str | None, limit: int) -> int:
        ids = republishing.publish_again(
            connection, self._tables, queue, after=self._republish_after, limit=limit
        )
        self._note_republished(connection, ids)
        return len(ids)

    def _note_republished(self, connection: Connection, ids: Sequence[str]) -> None:
        lines = [journal.line(job_id, "republished", actor=self._actor) for job_id in ids]
        journal.write(connection, self._tables, lines)
