"""Takes back what silent workers hold, and ends what has expired."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from celery.utils.nodenames import gethostname
from sqlalchemy import Connection

from celery_outbox.core.classification import Verdict
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryIn, RetryPolicy, after_failure
from celery_outbox.log import log_event
from celery_outbox.store import job as jobs
from celery_outbox.store import transitions
from celery_outbox.store.database import Database

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
    """

    rescued: int = 0
    quarantined: int = 0
    expired: int = 0


class Maintenance:
    """The maintenance of one outbox; runs that meet do not get into each other's way.

    Arguments:
        database: the outbox tables.
        policy_of: returns how jobs of a task are retried.
    """

    def __init__(self, database: Database, *, policy_of: Callable[[str], RetryPolicy]) -> None:
        self._database = database
        self._tables = database.tables
        self._policy_of = policy_of
        self._actor = f"maintenance:{gethostname()}:{os.getpid()}"

    def run(self) -> Maintained:
        """Do everything that is due now.

        Raises:
            SchemaError: the tables are missing or have another version.
            sqlalchemy.exc.SQLAlchemyError: the database is away.
        """
        done = Maintained()
        while self._database.write(lambda c: self._rescue(c, done)) == BATCH:
            pass
        while self._database.write(lambda c: self._expire(c, done)) == BATCH:
            pass
        if done != Maintained():
            log_event(
                logger,
                logging.INFO,
                "outbox.maintained",
                rescued=done.rescued,
                quarantined=done.quarantined,
                expired=done.expired,
            )
        return done

    def _rescue(self, connection: Connection, done: Maintained) -> int:
        found = jobs.lock_expired(connection, self._tables, BATCH)
        for job in found:
            step = after_failure(
                _LOST,
                attempt=job.attempt,
                max_attempts=job.max_attempts,
                policy=self._policy_of(job.task),
                random=random.random(),
            )
            if isinstance(step, RetryIn):
                done.rescued += transitions.rescue(
                    connection, self._tables, job, actor=self._actor, delay=step.delay
                )
            else:
                done.quarantined += transitions.quarantine(
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
                )
        return len(found)

    def _expire(self, connection: Connection, done: Maintained) -> int:
        found = jobs.lock_overdue(connection, self._tables, BATCH)
        for job in found:
            done.expired += transitions.expire(
                connection, self._tables, job.id, attempt=job.attempt, actor=self._actor
            )
        return len(found)
