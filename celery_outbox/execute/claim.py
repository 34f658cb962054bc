"""What a delivery means for its job: decided and written down in one transaction."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from celery import Task
from sqlalchemy import Connection

from celery_outbox.core.decisions import (
    Decision,
    Defer,
    Expire,
    GiveUpLost,
    Mismatch,
    Run,
    Unknown,
    decide,
)
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State
from celery_outbox.exceptions import LostRace
from celery_outbox.execute import adoption
from celery_outbox.execute.delivery import Delivery
from celery_outbox.execute.outside import note_foreign
from celery_outbox.execute.payload import Call
from celery_outbox.store import job as jobs
from celery_outbox.store import messages, quarantining, transitions
from celery_outbox.store.job import Job
from celery_outbox.store.postgresql.running import claim_in_one

if TYPE_CHECKING:
    from celery_outbox.execute.guard import Guard


class Claim:
    """The claim of one delivery; called with a connection, again where that was rolled back.

    Arguments:
        task: the one that the message names.
        call: what the message carries itself, if it did not come through an outbox.
    """

    def __init__(self, guard: Guard, task: Task, delivery: Delivery, call: Call) -> None:
        self._guard = guard
        self._tables = guard.tables
        self._task = task
        self._delivery = delivery
        self._call = call
        self._nonce = secrets.randbits(63)

    def at_once(self, connection: Connection) -> tuple[Decision, Job | None] | None:
        """Claim a job that waits for nothing but a worker, in one statement (PostgreSQL).

        Returns:
            As when it is called; ``None``: that is to be done.
        """
        if not self._delivery.is_claim_check:
            return None
        row = claim_in_one(
            connection,
            self._tables,
            self._delivery.job_id,
            task=self._task.name,
            nonce=self._nonce,
            actor=self._guard.worker_id(),
            lease=self._guard.config.lease,
        )
        return None if row is None else (Run(), Job.from_row(row))

    def __call__(self, connection: Connection) -> tuple[Decision, Job | None]:
        """Lock the job, decide, and write the decision down.

        Returns:
            The decision, and the job afterwards; ``None``: there is no such job.

        Raises:
            LostRace: the job changed while it was locked.
            kombu.exceptions.EncodeError, InvalidResultKey: the message cannot become a job.
        """
        delivery = self._delivery
        if not delivery.is_claim_check:
            adoption.adopt(connection, self._guard, self._task, delivery, self._call)
        job = jobs.lock(connection, self._tables, delivery.job_id)
        if job is None:
            return Unknown(), None
        if job.relay and not delivery.is_claim_check and job.task == self._task.name:
            job = adoption.take_over(connection, self._guard, self._task, job, self._call)
        if self._holds(job):
            # It was committed, and the answer to that was lost.
            return Run(), job
        decision = decide(
            job.facts,
            same_task=job.task == self._task.name,
            outdated=delivery.is_claim_check and delivery.attempts_before < job.attempt,
            now=job.now,
            redelivered=delivery.redelivered,
            copied=job.finished_at is not None
            and messages.has_copy(connection, self._tables, job.id, job.finished_at),
        )
        self._write(connection, job, decision)
        return decision, jobs.get(connection, self._tables, job.id)

    def _holds(self, job: Job) -> bool:
        """Whether an earlier call has claimed the job, and the claim still holds."""
        return (
            job.state is State.RUNNING
            and job.lease_nonce == self._nonce
            and job.leased_until is not None
            and job.leased_until > job.now
        )

    def _write(self, connection: Connection, job: Job, decision: Decision) -> None:
        guard, tables, actor = self._guard, self._tables, self._guard.worker_id()
        if isinstance(decision, Run):
            if not transitions.claim(
                connection,
                tables,
                job,
                actor=actor,
                lease=guard.config.lease,
                nonce=self._nonce,
            ):
                # Only where the lock does not hold (an engine in autocommit): look again.
                raise LostRace(job_id=job.id)
        elif isinstance(decision, GiveUpLost):
            transitions.add_delivery(connection, tables, job.id)
            quarantining.quarantine(
                connection,
                tables,
                job.id,
                job.lease_token,
                attempt=job.attempt,
                actor=actor,
                reason=decision.reason,
                error_code=str(decision.reason),
                copy=not guard.broker_dead_letters(job.queue),
            )
        elif isinstance(decision, Defer):
            transitions.defer(connection, tables, job, until=decision.until, actor=actor)
        elif isinstance(decision, Expire):
            transitions.expire(
                connection, tables, job.id, attempt=job.attempt, actor=actor, report=False
            )
        elif isinstance(decision, Mismatch):
            foreign = adoption.foreign_of(guard, self._task, self._delivery, self._call)
            taken = Reason.ID_TAKEN
            note_foreign(connection, guard, foreign, job, taken, str(taken))
        else:
            transitions.count_delivery(connection, tables, job, event="duplicate", actor=actor)
