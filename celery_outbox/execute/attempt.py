"""One attempt of a job: what a worker claimed, and the write that ends it."""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.utils.serialization import get_pickleable_exception
from kombu.exceptions import EncodeError
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from celery_outbox.context import of_no_job
from celery_outbox.core.classification import Verdict, error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import RetryIn, after_failure
from celery_outbox.core.states import State
from celery_outbox.exceptions import LeaseLost, ResultMissing, TooLargeForDatabase, TransactionOver
from celery_outbox.execute.celery_versions import (
    WORKER_STOPPED,
    ends_worker,
    is_green_timeout,
)
from celery_outbox.execute.failure import delay_of, detail_of, verdict_on
from celery_outbox.execute.hold import Hold
from celery_outbox.execute.payload import decode_result, encode_result
from celery_outbox.log import log_event
from celery_outbox.store.job import Job
from celery_outbox.store.recording import NewJob

logger = logging.getLogger("celery_outbox.execute")


@dataclass
class Attempt(Hold):
    """What a worker does with one delivery, from the claim to the settle.

    Attributes:
        outcome: decided before the body: ``None``: run it; a callable: return its value, or
            raise its error, in place of the body.
        entered: the body, or what stands for it, has begun.
        gave_up: the body asked Celery for a retry and was at its own limit.
        keep_from_broker: acknowledge a failure instead of rejecting it: the quarantine queue has
            a copy already.
        retry_error: what the body gave as the cause of the retry that it asked for.
        failing: the body asks for a retry because of an error.
        result: what the job has succeeded with, in this attempt.
    """

    outcome: Callable[[], Any] | None = None
    entered: bool = False
    gave_up: bool = False
    keep_from_broker: bool = False
    retry_error: BaseException | None = None
    failing: bool = False
    result: Any = None
    _began: float = field(default_factory=time.monotonic)
    _handled: BaseException | None = None

    @property
    def retries(self) -> int:
        """How often the present call was tried before, as Celery counts."""
        return max(self.number - 1 - self.job.attempts_before, 0)

    @property
    def now(self) -> datetime:
        """The database's clock, as far as the claim and the time since then tell: this machine's
        may be wrong."""
        return self.job.now + timedelta(seconds=time.monotonic() - self._began)

    def execute(self, body: Callable[[], Any]) -> Any:
        """Run the body and settle; what this returns or raises is what Celery goes on with."""
        self.entered = True
        if self.outcome is not None:
            return self.outcome()
        self._say_redelivered()
        # What its caller may be handling is none of the body's errors.
        self._handled = sys.exc_info()[1]
        try:
            if getattr(self.task, "transactional", False):
                # An earlier attempt may have written the result, but nothing into the database.
                with self._open_transaction():
                    return self._run(body)
            if self._result_exists():
                # An earlier attempt wrote the result and did not live to say so.
                return self._succeed(self.job.result_key)
            return self._run(body)
        except LeaseLost as error:
            raise self._lose() from error
        except (Retry, Ignore, Reject) as signal:
            answer = self._answer(signal)
            if answer is signal:
                raise
            raise answer from signal
        except Exception as error:
            if self.ended is State.SUCCEEDED:
                return self._failed_after_success()
            answer = self._after_the_end(error) if self.settled else self._failed(error)
            if answer is error:
                raise
            raise answer from error
        except BaseException as error:
            # sys.exit(), Ctrl-C, a killed greenlet: the attempt is over, whatever becomes of
            # the process.
            self.leave(error)
            raise

    def _say_redelivered(self) -> None:
        """Let a body see that this is not the first delivery of its call, where it did not ask for
        another one itself (``self.retry()``). Each attempt has a message of its own here."""
        asked_for = self.job.envelope.headers.get("retries") or 0
        request = self.task.request
        if self.retries > asked_for:
            request.delivery_info = {**(request.delivery_info or {}), "redelivered": True}

    @contextmanager
    def in_transaction(self, result: Any = None) -> Iterator[Session]:
        """A transaction that ends the job: what :meth:`OutboxTask.transaction` opens in a worker.

        Arguments:
            result: the job's result.

        Raises:
            TransactionOver: the job has ended, or is in a transaction already.
            LeaseLost: another attempt owns the job; nothing was committed.
        """
        problem, remedy = "", "Write everything in one block."
        if self.settled:
            problem = "it has ended with its first one"
        elif self.transaction is not None:
            problem, remedy = "it is in one already", "Use self.session."
        elif self.job.result_key is not None:
            problem = "its result_key alone ends it, so the transaction might never be made"
            remedy = "Use transactional=True."
        if problem:
            raise TransactionOver(
                job_id=self.job.id, task=self.task.name, problem=problem, remedy=remedy
            )
        with self._open_transaction() as session:
            yield session
            self.check_calls()
            self._succeed(result)

    @contextmanager
    def asking_again(self, error: BaseException | None) -> Iterator[None]:
        """The body calls ``self.retry()`` in this block.

        Arguments:
            error: what it gives as the cause.
        """
        self.retry_error = error
        # Without an error a retry is no failure: the body wants to be called again.
        self.failing = error is not None or sys.exc_info()[1] is not self._handled
        try:
            yield
        except (Retry, Reject):
            raise
        except Exception:
            # The task's own limit is reached, and Celery raises the error itself.
            self.gave_up = not self.settled
            raise
        finally:
            self.failing = False

    def resume_as(self, new: NewJob) -> None:
        """End the attempt because the body sent its own id again.

        Raises:
            UncommittedCalls: it left a call uncommitted, which no other attempt makes again.
        """
        self.guard.check_room(new.body)
        part = self.job.part
        if self.replacing:
            part = part.replaced(self.number, new.max_attempts)
        elif self.failing:
            part = part.again(self.number, new.max_attempts)
        else:
            part = part.on(self.number, new.max_attempts)
        if part.number != self.job.part.number:
            self.check_calls()
        error = self.retry_error
        code = (
            None
            if error is None
            else verdict_on(self.task, self.job.id, error, self.now).error_code
        )
        if not self._settle(State.RETRYING, self._fence.resume_as(new, part, code)):
            # Not raised here: Task.retry() would turn it into a rejected message.
            self._lose()

    def go_on_as(self, send: Callable[[], Any]) -> None:
        """End the attempt because the body was replaced by what ``send`` records: both in one
        transaction, so that neither is there without the other.

        Arguments:
            send: calls a chain, group or chord whose last step has the job's id.

        Raises:
            UncommittedCalls: the body left a call uncommitted.
        """
        self.check_calls()
        replaced = self._fence.replace()

        def write(connection: Connection) -> bool:
            # First: whoever has lost the lease records nothing.
            if not replaced(connection):
                return False
            with of_no_job(), self.task.outbox.use(connection):
                send()
            self.guard.database.buffers.write(connection)
            return True

        try:
            took = self._settle(State.REPLACED, write)
        except Reject:
            raise
        except Exception:
            # It cannot be recorded, and nothing was written.
            self.settled = False
            raise
        if not took:
            raise self._lose()

    def refusal(self, error: Exception) -> Callable[[], Any]:
        """What stands for the body when the stored payload cannot be read."""

        def refuse() -> Any:
            verdict = Verdict(True, error_code(error))
            raise self._quarantine(verdict, Reason.UNDECODABLE, error)

        return refuse

    def fail_outside_body(self, error: Exception) -> Exception:
        """End the attempt after Celery failed the task before its body (``before_start``).

        Returns:
            What the delivery ends with: ``error``, or one of Celery's signals.
        """
        return self._failed(error)

    def _run(self, body: Callable[[], Any]) -> Any:
        try:
            value = body()
        except Ignore as signal:
            if self.settled:
                raise
            self.check_calls()
            # No result, and no failure either; inside the body's transaction, if it has one.
            self._succeed(None)
            raise signal
        if not self.settled:
            self.check_calls()
        if not self._result_exists(default=True):
            raise ResultMissing(task=self.task.name, key=self.job.result_key)
        return self._succeed(value)

    def _failed_after_success(self) -> Any:
        """The body went on after its transaction had ended the job, and failed."""
        log_event(
            logger, logging.ERROR, "outbox.failed_after_success", exc_info=True, job=self.job.id
        )
        return self.result

    def _result_exists(self, default: bool = False) -> bool:
        key = self.job.result_key
        return default if key is None else self.guard.result_store().exists(key)

    def _succeed(self, value: Any) -> Any:
        if self.unwritten:
            raise Reject("the database is away", requeue=True)
        if self.ended is State.SUCCEEDED:
            # self.transaction() has ended the job.
            return self._keep_result(value)
        result: bytes | None = None
        result_type: str | None = None
        try:
            result, result_type = self._encode(value)
        except (EncodeError, TooLargeForDatabase):
            # Celery fails such a task too, unless nobody wants the result.
            if not self.task.request.ignore_result:
                raise
        # Before: a soft time limit may come as soon as it is written.
        self.result = value
        took = self._settle(State.SUCCEEDED, self._fence.succeed(result, result_type))
        if not took:
            raise LeaseLost(job_id=self.job.id, attempt=self.number)
        return value

    def _encode(self, value: Any) -> tuple[bytes, str]:
        result, result_type = encode_result(self.guard.app, value)
        self.guard.check_room(result)
        return result, result_type

    def _keep_result(self, value: Any) -> Any:
        """Store what the body returned after its transaction had ended the job."""
        if value is None:
            return self.result
        try:
            result, result_type = self._encode(value)
            keep = self._fence.keep_result(result, result_type)
            self.guard.settle("result", keep, in_one=True)
        except (EncodeError, TooLargeForDatabase, SQLAlchemyError):
            # The job has succeeded; a duplicate gets the result that the block was given.
            log_event(
                logger, logging.ERROR, "outbox.result_not_kept", exc_info=True, job=self.job.id
            )
        return value

    def _answer(self, signal: Retry | Ignore | Reject) -> Exception:
        """Settle an attempt that ended by one of Celery's signals; returns what to raise."""
        if self.unwritten:
            return Reject("the database is away", requeue=True)
        if self.stale:
            return self._lose()
        if self.settled:
            # self.retry() and self.replace() settle when they send the job's own id.
            return signal
        try:
            if isinstance(signal, Retry):
                delay = delay_of(signal, self.now)
                return self._follow(Verdict(False, error_code(signal)), signal, delay)
            if isinstance(signal.reason, Exception):
                # Task.retry() wraps what went wrong while it recorded the next attempt.
                return self._failed(signal.reason)
            verdict = Verdict(not signal.requeue, error_code(signal), reason=Reason.REJECTED)
            return self._follow(verdict, signal)
        except (Ignore, Reject) as settled:
            return settled

    def _failed(self, error: Exception) -> Exception:
        """Settle a failure; returns what to raise to Celery."""
        verdict = verdict_on(self.task, self.job.id, error, self.now)
        try:
            if self.gave_up and not verdict.permanent:
                # The task's own limit (max_retries) is reached: Celery would fail it here.
                return self._quarantine(verdict, Reason.ATTEMPTS_EXHAUSTED, error)
            return self._follow(verdict, error)
        except Reject as unwritten:
            return unwritten

    def _follow(self, verdict: Verdict, error: Exception, delay: float | None = None) -> Exception:
        step = after_failure(
            verdict,
            attempt=self.number,
            max_attempts=self.job.max_attempts,
            attempts_before=self.job.attempts_before,
            policy=self.guard.policy_of(self.task),
            random=random.random(),
        )
        if isinstance(step, RetryIn):
            return self._retry(verdict, step.delay if delay is None else delay, error)
        return self._quarantine(verdict, step.reason, error)

    def _after_the_end(self, error: Exception) -> Exception:
        """What to raise for an error that came after the attempt's end was written."""
        if self.unwritten:
            return Reject(error_code(error), requeue=True)
        if self.ended is State.RETRYING:
            # The body failed after self.retry() had recorded the next attempt.
            return Retry(exc=get_pickleable_exception(error))
        return error

    def leave(self, error: BaseException) -> None:
        """Settle, unless it is done, an attempt that ended by what Celery does not handle."""
        if self.settled:
            return
        self.left = True
        code, reason = error_code(error), Reason.LOST_WORKER
        if ends_worker(error):
            code = WORKER_STOPPED
        elif is_green_timeout(error):
            code, reason = str(Reason.TIME_LIMIT), Reason.TIME_LIMIT
        try:
            self._follow(Verdict(False, code, reason=reason), RuntimeError(code))
        except (Reject, Ignore):
            log_event(logger, logging.WARNING, "outbox.left_running", job=self.job.id)

    def _retry(self, verdict: Verdict, delay: float, error: Exception | None) -> Exception:
        detail = detail_of(error, self.guard.config.error_detail)
        took = self._settle(State.RETRYING, self._fence.retry(verdict.error_code, detail, delay))
        if not took:
            return self._lose()
        # Celery marks the task as being retried and acknowledges the delivery.
        if isinstance(error, Retry):
            return error
        reason = None if error is None else get_pickleable_exception(error)
        return Retry(exc=reason, when=delay)

    def _quarantine(self, verdict: Verdict, reason: Reason, error: Exception) -> Exception:
        copy = not self.guard.broker_dead_letters(self.job.queue)
        detail = detail_of(error, self.guard.config.error_detail)
        took = self._settle(
            State.QUARANTINED, self._fence.quarantine(reason, verdict.error_code, detail, copy)
        )
        if not took:
            return self._lose()
        return error


def stored_result(job: Job) -> Callable[[], Any]:
    """Returns the result of a job that has succeeded."""
    return lambda: decode_result(job.result, job.result_type)


def raising(error: Exception) -> Callable[[], Any]:
    """Raises ``error`` in place of the body."""

    def fail() -> Any:
        raise error

    return fail
