"""The writes that end an attempt; each names its lease token and reports whether it took effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from celery_outbox.core.part import Part
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
        return self._ending(transitions.succeed, result=result, result_type=result_type)

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
        return self._ending(
            transitions.retry, error_code=error_code, error_detail=error_detail, delay=delay
        )

    def resume_as(self, new: NewJob, part: Part, error_code: str | None) -> Write:
        """Another attempt follows, with the message that the body itself sent."""
        return self._ending(transitions.resume_as, new=new, part=part, error_code=error_code)

    def replace(self) -> Write:
        """The job goes on as others, the last of which will have its id."""
        return self._ending(continuing.replace)

    def quarantine(
        self, reason: Reason, error_code: str, error_detail: str | None, copy: bool
    ) -> Write:
        """No attempt follows before a person decides."""
        return self._ending(
            quarantining.quarantine,
            reason=reason,
            error_code=error_code,
            error_detail=error_detail,
            copy=copy,
        )

    def _ending(self, transition: Callable[..., bool], **facts: Any) -> Write:
        return lambda connection: transition(
            connection,
            self.tables,
            self.job_id,
            self.token,
            attempt=self.attempt,
            actor=self.actor,
            **facts,
        )
