"""The writes that end an attempt; each names its lease token and reports whether it took effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import Connection

from celery_outbox.core.reasons import Reason
from celery_outbox.store import continuing, quarantining, transitions
from celery_outbox.store.recording import NewJob
from celery_outbox.store.schema import Tables

#: Runs in a transaction; ``False``: the lease was lost, and nothing was written.
Write = Callable[[Connection], bool]


@dataclass(frozen=True)
class Fence:
    """Makes the writes of one attempt.

    Attributes:
        token: the lease token of the attempt.
        attempt: its number.
        actor: the worker, for the journal.
    """

    tables: Tables
    job_id: str
    token: int
    attempt: int
    actor: str

    def succeed(self, result: bytes | None, result_type: str | None) -> Write:
        """The attempt ends with its result."""
        return lambda connection: transitions.succeed(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
            result=result,
            result_type=result_type,
        )

    def keep_result(self, result: bytes | None, result_type: str | None) -> Write:
        """The attempt has succeeded, and its result is known now."""
        return lambda connection: transitions.keep_result(
            connection,
            self.tables,
            self.job_id,
            self.token,
            result=result,
            result_type=result_type,
        )

    def retry(self, error_code: str, error_detail: str | None, delay: float) -> Write:
        """Another attempt follows in ``delay`` seconds."""
        return lambda connection: transitions.retry(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
            error_code=error_code,
            error_detail=error_detail,
            delay=delay,
        )

    def resume_as(self, new: NewJob, error_code: str | None) -> Write:
        """Another attempt follows, with the message that the body itself sent."""
        return lambda connection: transitions.resume_as(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
            task=new.task,
            queue=new.queue,
            envelope=new.envelope,
            body=new.body,
            available_at=new.available_at,
            expires_at=new.expires_at,
            result_key=new.result_key,
            max_attempts=new.max_attempts,
            error_code=error_code,
            relay=new.relay,
        )

    def replace(self) -> Write:
        """The job goes on as others, the last of which will have its id."""
        return lambda connection: continuing.replace(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
        )

    def quarantine(
        self, reason: Reason, error_code: str, error_detail: str | None, copy: bool
    ) -> Write:
        """No attempt follows before a person decides."""
        return lambda connection: quarantining.quarantine(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
            reason=reason,
            error_code=error_code,
            error_detail=error_detail,
            copy=copy,
        )
