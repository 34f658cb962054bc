"""Stands between Celery's worker and a task: claims before, settles after, absorbs duplicates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from celery import Celery, Task, signals, states
from celery.app.task import Context
from celery.app.trace import trace_ok_t
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from celery_outbox.config import Config
from celery_outbox.context import reporting, running_job
from celery_outbox.core.classification import error_code
from celery_outbox.core.decisions import (
    Decision,
    FailAgain,
    GiveUpLost,
    Mismatch,
    ReturnStored,
    Run,
)
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryPolicy
from celery_outbox.core.states import State
from celery_outbox.exceptions import (
    InvalidJobId,
    InvalidResultKey,
    JobQuarantined,
    SchemaError,
    TooLargeForDatabase,
    UnknownJob,
)
from celery_outbox.execute import adoption
from celery_outbox.execute.attempt import Attempt, raising, stored_result
from celery_outbox.execute.celery_versions import must_leave
from celery_outbox.execute.claim import Claim
from celery_outbox.execute.delivery import Delivery
from celery_outbox.execute.escaped import caught, is_redelivered, unreported
from celery_outbox.execute.hold import Lease
from celery_outbox.execute.hydrating import hydrate
from celery_outbox.execute.payload import Call
from celery_outbox.execute.result_store import ResultStore
from celery_outbox.execute.traced import ended_by
from celery_outbox.execute.transaction import undo
from celery_outbox.log import cause, log_event
from celery_outbox.queues import queue_of
from celery_outbox.store import job as jobs
from celery_outbox.store import journal
from celery_outbox.store.database import Database
from celery_outbox.store.job import Job
from celery_outbox.store.patience import LONGEST_PAUSE, patiently, pause

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
        body_session: opens a session for the transaction of a body, in which the calls that the
            body makes are recorded.
        open_session: the application's own session, if a transaction has begun in it here.
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
        body_session: Callable[[], AbstractContextManager[Session]],
        open_session: Callable[[], Any],
    ) -> None:
        self.app = app
        self.config = config
        self.tables = database.tables
        self.worker_id = worker_id
        self.result_store = result_store
        self.broker_dead_letters = broker_dead_letters
        self.body_session = body_session
        self._open_session = open_session
        self.database = database

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

        What a body, or anybody before it, leaves open in the application's session is undone:
        the next job would commit it, or lose its own calls with it.
        """
        self.undo_what_was_left(job_id)
        delivery = self.delivery_of(job_id, request)
        call = Call(args, kwargs, {name: request.get(name) for name in _EMBED})
        try:
            return self._trace(task, tracer, delivery, call, request)
        except BaseException as error:
            if must_leave(error):
                raise
            # A greenlet that was killed in its claim, or a fault of ours: nothing is known.
            log_event(logger, logging.ERROR, "outbox.guard_failed", exc_info=True, job=job_id)
            return ended_by(Reject(error_code(error), requeue=True))
        finally:
            self.undo_what_was_left(job_id)

    def _trace(
        self,
        task: Task,
        tracer: Tracer,
        delivery: Delivery,
        call: Call,
        request: dict[str, Any],
    ) -> trace_ok_t:
        try:
            started = self._start(task, delivery, call, request)
        except SoftTimeLimitExceeded:
            # Before the body: the delivery has not had its turn.
            return self._put_back(delivery, "SoftTimeLimitExceeded")
        except (SQLAlchemyError, SchemaError) as error:
            return self._put_back(delivery, cause(error))
        except Exception as error:
            # Whatever it is, the next delivery must not die of it as well, nor be lost.
            log_event(
                logger, logging.ERROR, "outbox.guard_failed", exc_info=True, job=delivery.job_id
            )
            if delivery.redelivered:
                return ended_by(Reject(error_code(error), requeue=False))
            return self._put_back(delivery, type(error).__name__)
        return self._run(tracer, started, request) if isinstance(started, Attempt) else started

    def undo_what_was_left(self, job_id: str) -> None:
        """Roll back what is open in the application's session."""
        try:
            session = self._open_session()
        except Exception:  # a session of a framework whose context is over has been ended with it
            return
        if isinstance(session, Session):
            log_event(logger, logging.DEBUG, "outbox.session_left_open", job=job_id)
            undo(session, self.database)

    def _start(
        self, task: Task, delivery: Delivery, call: Call, request: dict[str, Any]
    ) -> Attempt | trace_ok_t:
        """Claim the job: what there is to run, or what to tell Celery instead."""
        if not delivery.is_valid:
            error = InvalidJobId(
                job_id=delivery.job_id, task=task.name, problem="its id is unusable"
            )
            return self._alien(task, delivery, call, Reason.UNDECODABLE, error)
        try:
            decision, job = self._claim(Claim(self, task, delivery, call))
        except (EncodeError, InvalidResultKey, TooLargeForDatabase) as error:
            return self._alien(task, delivery, call, Reason.UNDECODABLE, error)
        if job is None:
            unknown = UnknownJob(job_id=delivery.job_id)
            return self._alien(task, delivery, call, Reason.UNKNOWN_JOB, unknown)
        if isinstance(decision, Mismatch):
            log_event(
                logger, logging.ERROR, "outbox.task_mismatch", job=job.id, message_task=task.name
            )
            return ended_by(Reject("its job is of another task", requeue=False))
        if isinstance(decision, (Run, ReturnStored, FailAgain, GiveUpLost)):
            return self._attempt(task, decision, job)
        if job.state is State.EXPIRED:
            # Also where maintenance ended it: nobody has told the caller who waits.
            self._revoke(task, Attempt(self, task, job, _no_lease(job)), request, "expired")
        elif job.state is State.CANCELLED and not delivery.redelivered:
            self._revoke(task, Attempt(self, task, job, _no_lease(job)), request, "revoked")
        return ended_by(Ignore(type(decision).__name__.lower()))

    def _put_back(self, delivery: Delivery, why: str) -> trace_ok_t:
        log_event(logger, logging.ERROR, "outbox.claim_failed", job=delivery.job_id, error=why)
        # The broker delivers it again at once; without a pause that is a hot loop.
        pause(LONGEST_PAUSE)
        return ended_by(Reject("the job cannot be claimed", requeue=True))

    def _claim(self, claim: Claim) -> tuple[Decision, Job | None]:
        database = self.database

        def take() -> tuple[Decision, Job | None]:
            taken = database.write_in_one(claim.at_once) if database.does_in_one else None
            return database.write(claim) if taken is None else taken

        return patiently(take, timeout=self.config.database_timeout, what="claim")

    def settle(
        self, what: str, write: Callable[[Connection], bool], *, in_one: bool = False
    ) -> bool:
        """Write the end of an attempt; waits for a database that is away.

        Arguments:
            in_one: it is one statement, where the database does that.

        Returns:
            Whether it took effect; ``False``: the lease was lost.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: the database did not take it in time.
        """
        run = self.database.write_in_one if in_one else self.database.write
        return patiently(lambda: run(write), timeout=self.config.settle_timeout, what=what)

    def check_room(self, value: bytes | None) -> None:
        """Check that the database takes a value. One that is away is not asked: the write waits.

        Raises:
            TooLargeForDatabase: it does not.
        """
        with contextlib.suppress(SQLAlchemyError):
            self.database.check_room(value)

    def has_ended(self, job_id: str, token: int, end: State) -> bool:
        """Whether the attempt with this lease token has left its job in the state ``end``;
        waits for a database that is away, and for a write of it that may still be on its way."""
        job = self._outcome(job_id)
        return job is not None and job.lease_token == token and job.state is end

    def has_forgotten(self, job_id: str, token: int) -> bool:
        """Whether a crash of the database has undone the claim of the attempt with this lease
        token: claims do not wait for the disk. Waits for a database that is away."""
        job = self._outcome(job_id)
        # Tokens only grow, so a smaller one is of the time before the claim.
        if job is None or job.lease_token >= token:
            return False
        log_event(logger, logging.ERROR, "outbox.claim_forgotten", job=job_id, token=token)
        return True

    def note_stale(self, job: Job, lease: Lease) -> None:
        """Say in the journal that an attempt ended after it had lost its lease."""
        log_event(logger, logging.WARNING, "outbox.lease_lost", job=job.id, attempt=job.attempt)
        line = journal.line(job.id, "stale", attempt=job.attempt, actor=lease.by)
        try:
            self.database.write(lambda connection: journal.write(connection, self.tables, [line]))
        except SQLAlchemyError:
            log_event(logger, logging.ERROR, "outbox.journal_failed", exc_info=True, job=job.id)

    def delivery_of(self, job_id: str, request: Mapping[str, Any]) -> Delivery:
        """What the message of a request says about its job."""
        info = request.get("delivery_info") or {}
        queue = queue_of(self.app, info.get("exchange"), info.get("routing_key"))
        return Delivery.of(job_id, request, queue)

    def policy_of(self, task: Task) -> RetryPolicy:
        """How jobs of a task are retried."""
        policy: RetryPolicy = getattr(task, "retry_policy", None) or self.config.retry_policy
        limit = getattr(task, "max_attempts", None)
        return policy if limit is None else replace(policy, max_attempts=limit)

    def _outcome(self, job_id: str) -> Job | None:
        return self._patiently(
            "outcome",
            lambda connection: jobs.lock(connection, self.tables, job_id),
            timeout=self.config.settle_timeout,
        )

    def _patiently(
        self, what: str, write: Callable[[Connection], Any], timeout: float | None = None
    ) -> Any:
        return patiently(
            lambda: self.database.write(write),
            timeout=self.config.database_timeout if timeout is None else timeout,
            what=what,
        )

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

    def _alien(
        self, task: Task, delivery: Delivery, call: Call, reason: Reason, error: Exception
    ) -> Attempt:
        """Keep a message that is no job of ours where a person can see it."""
        job = self._patiently(
            "quarantine",
            lambda connection: adoption.quarantine(connection, self, task, delivery, call, reason),
        )
        attempt = Attempt(self, task, job, _no_lease(job), outcome=raising(error))
        attempt.settled = True
        return attempt

    def _run(self, tracer: Tracer, attempt: Attempt, request: dict[str, Any]) -> trace_ok_t:
        call = hydrate(self.app, attempt, request)
        token = running_job.set(attempt)
        try:
            traced = tracer(attempt.job_id, call.args, call.kwargs, request)
        except BaseException as escaped:
            if must_leave(escaped):
                raise
            if isinstance(escaped, Exception):
                return unreported(attempt, escaped, request)
            traced = caught(attempt, escaped, request)
        finally:
            running_job.reset(token)
        if traced.info is None:
            return traced
        if not attempt.settled:
            # before_start or a signal receiver failed, so the body was never reached.
            failure = traced.info.retval
            ends_with = attempt.fail_outside_body(failure)
            return traced if ends_with is failure else ended_by(ends_with)
        if attempt.keep_from_broker:
            return ended_by(Ignore("its copy went through the outbox"))
        if attempt.has_succeeded and traced.info.state == states.FAILURE:
            # A callback could not be sent. The next delivery finds the result and sends it;
            # what fails then fails for good, and the message shows it in the quarantine queue.
            log_event(logger, logging.ERROR, "outbox.callback_failed", job=attempt.job_id)
            if not is_redelivered(request):
                pause(LONGEST_PAUSE)
                return ended_by(Reject("a callback could not be sent", requeue=True))
        return traced

    def _revoke(self, task: Task, attempt: Attempt, request: dict[str, Any], why: str) -> None:
        """Tell Celery's result backend and signals that a job will not run."""
        hydrate(self.app, attempt, request)
        context = Context(request)
        expired = why == "expired"
        with reporting(attempt.job_id):
            try:
                task.backend.mark_as_revoked(
                    attempt.job_id,
                    why,
                    request=context,
                    store_result=not context.ignore_result,
                )
            except Exception:  # the result backend may be anything, and the job has ended
                log_event(
                    logger, logging.ERROR, "outbox.revoke_failed", exc_info=True, job=attempt.job_id
                )
            signals.task_revoked.send(
                sender=task, request=context, terminated=False, signum=None, expired=expired
            )


#: The parts of a message's body beside the arguments.
_EMBED = ("callbacks", "errbacks", "chain", "chord")


def _lease(job: Job) -> Lease | None:
    if job.leased_by is None or job.leased_until is None:
        return None
    return Lease(job.leased_by, job.leased_until, job.lease_token)


def _no_lease(job: Job) -> Lease:
    return Lease("", job.now, job.lease_token)
