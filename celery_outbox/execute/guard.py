"""Stands between Celery's worker and a task: claims before, settles after, absorbs duplicates."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from billiard.einfo import ExceptionInfo
from celery import Celery, Task, signals, states
from celery.app.task import Context
from celery.app.trace import TraceInfo, trace_ok_t
from celery.exceptions import Ignore, Reject
from kombu.exceptions import EncodeError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.config import Config
from celery_outbox.context import running_job
from celery_outbox.core.classification import Verdict
from celery_outbox.core.decisions import (
    Decision,
    Defer,
    Expire,
    FailAgain,
    GiveUpLost,
    ReturnStored,
    Run,
    Unknown,
    decide,
)
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryIn, RetryPolicy, after_failure
from celery_outbox.core.states import State
from celery_outbox.exceptions import InvalidResultKey, JobQuarantined, SchemaError, UnknownJob
from celery_outbox.execute import adoption
from celery_outbox.execute.attempt import Attempt, Lease, raising, stored_result
from celery_outbox.execute.delivery import Delivery
from celery_outbox.execute.patience import LONGEST_PAUSE, patiently, pause
from celery_outbox.execute.payload import Call, Undecodable, decode_call
from celery_outbox.execute.result_store import ResultStore
from celery_outbox.log import log_event
from celery_outbox.store import job as jobs
from celery_outbox.store import journal, messages, transitions
from celery_outbox.store.database import Database
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox.execute")

Tracer = Callable[[str, Any, Any, dict[str, Any]], trace_ok_t]


class Guard:
    """Guards the tasks of one app in a worker.

    Arguments:
        app: the Celery app.
        config: the settings.
        database: the outbox tables.
        worker_id: names this start of the worker; it is in every lease.
        result_store: returns where results with a ``result_key`` go.
        broker_dead_letters: whether the broker copies a rejected message of a queue to the
            quarantine queue.
    """

    def __init__(
        self,
        app: Celery,
        config: Config,
        database: Database,
        *,
        worker_id: Callable[[], str],
        result_store: Callable[[], ResultStore],
        broker_dead_letters: Callable[[str | None], bool],
    ) -> None:
        self.app = app
        self.config = config
        self.tables = database.tables
        self.worker_id = worker_id
        self.result_store = result_store
        self.broker_dead_letters = broker_dead_letters
        self._database = database

    def trace(
        self,
        task: Task,
        tracer: Tracer,
        job_id: str,
        args: Any,
        kwargs: Any,
        request: dict[str, Any],
    ) -> trace_ok_t:
        """Handle one delivery: in place of Celery's tracer, which runs inside it.

        The claim comes before the tracer, so that signals, ``before_start`` and logs meet the
        job's real arguments; the settle comes in ``Task.__call__``, before callbacks go out.
        """
        delivery = Delivery.of(job_id, request)
        call = Call(args, kwargs, {name: request.get(name) for name in _EMBED})
        try:
            decision, job = self._patiently(
                "claim", lambda connection: self._claim(connection, task, delivery, call)
            )
            if job is None:
                attempt = self._alien(task, delivery, Reason.UNKNOWN_JOB, UnknownJob(job_id=job_id))
            elif isinstance(decision, (Run, ReturnStored, FailAgain, GiveUpLost)):
                attempt = self._attempt(task, decision, job)
            else:
                if isinstance(decision, Expire):
                    self._revoke(task, Attempt(self, task, job, _no_lease(job)), request)
                return _without_body(Ignore(type(decision).__name__.lower()), states.IGNORED)
        except (EncodeError, InvalidResultKey) as error:
            attempt = self._alien(task, delivery, Reason.UNDECODABLE, error)
        except (SQLAlchemyError, SchemaError) as error:
            log_event(
                logger, logging.ERROR, "outbox.claim_failed", job=job_id, error=type(error).__name__
            )
            # The broker delivers it again at once; without a pause that is a hot loop.
            pause(LONGEST_PAUSE)
            return _without_body(Reject("the job cannot be claimed", requeue=True), states.REJECTED)
        return self._run(tracer, attempt, request)

    def settle(self, what: str, write: Callable[[Connection], bool]) -> bool:
        """Write the end of an attempt; waits for a database that is away.

        Returns:
            Whether it took effect; ``False``: the lease was lost.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database did not take it in time.
        """
        return bool(self._patiently(what, write, timeout=self.config.settle_timeout))

    def settle_lost(self, task: Task, job_id: str, reason: Reason) -> Job | None:
        """End an attempt of this worker whose process is gone; for the worker's main process.

        Returns:
            The job afterwards, whoever ended the attempt; ``None``: there is no such job.
        """
        verdict = Verdict(False, str(reason), reason=reason)

        def write(connection: Connection) -> Job | None:
            job = jobs.lock(connection, self.tables, job_id)
            if job is None or job.state is not State.RUNNING or job.leased_by != self.worker_id():
                return job
            step = after_failure(
                verdict,
                attempt=job.attempt,
                max_attempts=job.max_attempts,
                policy=self.policy_of(task),
                random=random.random(),
            )
            end: dict[str, Any] = {
                "attempt": job.attempt,
                "actor": job.leased_by,
                "error_code": str(reason),
            }
            if isinstance(step, RetryIn):
                transitions.retry(
                    connection, self.tables, job_id, job.lease_token, delay=step.delay, **end
                )
            else:
                copy = not self.broker_dead_letters(job.queue)
                transitions.quarantine(
                    connection,
                    self.tables,
                    job_id,
                    job.lease_token,
                    reason=step.reason,
                    copy=copy,
                    **end,
                )
            return jobs.get(connection, self.tables, job_id)

        return self._database.write(write)

    def quarantine_unknown_task(self, job_id: str, queue: str | None) -> bool:
        """Quarantine a waiting job whose task the worker does not have.

        Returns:
            Whether it took effect.
        """

        def write(connection: Connection) -> bool:
            job = jobs.lock(connection, self.tables, job_id)
            if job is None:
                return False
            return transitions.quarantine_waiting(
                connection,
                self.tables,
                job_id,
                attempt=job.attempt,
                actor=self.worker_id(),
                reason=Reason.UNKNOWN_TASK,
                error_code=str(Reason.UNKNOWN_TASK),
                copy=not self.broker_dead_letters(job.queue or queue),
            )

        return bool(self._database.write(write))

    def note_stale(self, job: Job, lease: Lease) -> None:
        """Say in the journal that an attempt ended after it had lost its lease."""
        log_event(logger, logging.WARNING, "outbox.lease_lost", job=job.id, attempt=job.attempt)
        line = journal.line(job.id, "stale", attempt=job.attempt, actor=lease.by)
        try:
            self._database.write(lambda connection: journal.write(connection, self.tables, [line]))
        except SQLAlchemyError:
            log_event(logger, logging.ERROR, "outbox.journal_failed", exc_info=True, job=job.id)

    def policy_of(self, task: Task) -> RetryPolicy:
        """How jobs of a task are retried."""
        policy: RetryPolicy = getattr(task, "retry_policy", None) or self.config.retry_policy
        limit = getattr(task, "max_attempts", None)
        return policy if limit is None else replace(policy, max_attempts=limit)

    def _patiently(
        self, what: str, write: Callable[[Connection], Any], timeout: float | None = None
    ) -> Any:
        return patiently(
            lambda: self._database.write(write),
            timeout=self.config.database_timeout if timeout is None else timeout,
            what=what,
        )

    def _claim(
        self, connection: Connection, task: Task, delivery: Delivery, call: Call
    ) -> tuple[Decision, Job | None]:
        """Decide what to do with a delivery and write it down; one transaction."""
        if not delivery.is_claim_check:
            adoption.adopt(connection, self, task, delivery, call)
        job = jobs.lock(connection, self.tables, delivery.job_id)
        if job is None:
            return Unknown(), None
        decision = decide(
            job.facts,
            now=job.now,
            redelivered=delivery.redelivered,
            copied=job.finished_at is not None
            and messages.has_copy(connection, self.tables, job.id, job.finished_at),
        )
        actor = self.worker_id()
        if isinstance(decision, Run):
            transitions.claim(connection, self.tables, job, actor=actor, lease=self.config.lease)
        elif isinstance(decision, GiveUpLost):
            transitions.add_delivery(connection, self.tables, job.id)
            transitions.quarantine(
                connection,
                self.tables,
                job.id,
                job.lease_token,
                attempt=job.attempt,
                actor=actor,
                reason=decision.reason,
                error_code=str(decision.reason),
                copy=not self.broker_dead_letters(job.queue),
            )
        elif isinstance(decision, Defer):
            transitions.defer(connection, self.tables, job, until=decision.until, actor=actor)
        elif isinstance(decision, Expire):
            transitions.expire(connection, self.tables, job.id, attempt=job.attempt, actor=actor)
        else:
            transitions.count_delivery(connection, self.tables, job, event="duplicate", actor=actor)
        return decision, jobs.get(connection, self.tables, job.id)

    def _attempt(self, task: Task, decision: Decision, job: Job) -> Attempt:
        attempt = Attempt(self, task, job, _lease(job) or _no_lease(job))
        if isinstance(decision, ReturnStored):
            attempt.outcome = stored_result(job)
        elif isinstance(decision, (FailAgain, GiveUpLost)):
            error = JobQuarantined(job.id, job.reason or str(Reason.LOST_WORKER), job.error_code)
            attempt.outcome = raising(error)
            attempt.keep_from_broker = isinstance(decision, FailAgain) and decision.copied
        # What is decided already leaves nothing to settle.
        attempt.settled = attempt.outcome is not None
        return attempt

    def _alien(self, task: Task, delivery: Delivery, reason: Reason, error: Exception) -> Attempt:
        """Keep a message that is no job of ours where a person can see it."""
        job = self._patiently(
            "quarantine",
            lambda connection: adoption.quarantine(connection, self, task, delivery, reason),
        )
        attempt = Attempt(self, task, job, _no_lease(job), outcome=raising(error))
        attempt.settled = True
        return attempt

    def _run(self, tracer: Tracer, attempt: Attempt, request: dict[str, Any]) -> trace_ok_t:
        call = self._hydrate(attempt, request)
        token = running_job.set(attempt)
        try:
            traced = tracer(attempt.job_id, call.args, call.kwargs, request)
        finally:
            running_job.reset(token)
        if not attempt.settled and traced.info is not None:
            # before_start or a signal receiver failed, so the body was never reached.
            attempt.fail_outside_body(traced.info.retval)
        if attempt.keep_from_broker:
            return _without_body(Ignore("its copy went through the outbox"), states.IGNORED)
        return traced

    def _hydrate(self, attempt: Attempt, request: dict[str, Any]) -> Call:
        """Put what the job's row says into the request that Celery's tracer works with."""
        job = attempt.job
        call, headers = Call([], {}, {}), {}
        try:
            headers = job.envelope.headers
            call = decode_call(self.app, job)
        except (Undecodable, ValueError, TypeError) as error:
            if attempt.outcome is None:
                attempt.outcome = attempt.refusal(error)
        for name, value in headers.items():
            if name not in ("id", "task", "eta"):
                request[name] = value
        request.update(call.embed)
        # Celery counts retries, this package counts attempts.
        request["retries"] = max(attempt.number - 1, 0)
        request["args"], request["kwargs"] = call.args, call.kwargs
        return call

    def _revoke(self, task: Task, attempt: Attempt, request: dict[str, Any]) -> None:
        """Tell Celery's result backend and signals that an expired job will not run."""
        self._hydrate(attempt, request)
        context = Context(request)
        try:
            task.backend.mark_as_revoked(
                attempt.job_id,
                "expired",
                request=context,
                store_result=not context.ignore_result,
            )
        except Exception:  # the result backend may be anything, and the job has ended
            log_event(
                logger, logging.ERROR, "outbox.revoke_failed", exc_info=True, job=attempt.job_id
            )
        signals.task_revoked.send(
            sender=task, request=context, terminated=False, signum=None, expired=True
        )


#: The parts of a message's body beside the arguments.
_EMBED = ("callbacks", "errbacks", "chain", "chord")


def _lease(job: Job) -> Lease | None:
    if job.leased_by is None or job.leased_until is None:
        return None
    return Lease(job.leased_by, job.leased_until, job.lease_token)


def _no_lease(job: Job) -> Lease:
    return Lease("", job.now, job.lease_token)


def _without_body(signal: Ignore | Reject, state: str) -> trace_ok_t:
    """What a tracer returns for a task that ended by one of Celery's signals."""
    try:
        raise signal
    except (Ignore, Reject):
        return trace_ok_t(ExceptionInfo(internal=True), TraceInfo(state, signal), 0.0, None)
