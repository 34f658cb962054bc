"""A delivery as the worker's child process gets it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery.utils.time import maybe_iso8601

from celery_outbox.execute.storable import is_storable
from celery_outbox.store.schema import MAX_JOB_ID

#: Marks a message that carries the job's id and type but not its arguments.
VERSION_HEADER = "outbox_version"


@dataclass(frozen=True)
class Delivery:
    """What a message says about its job.

    Attributes:
        job_id: the job's id; where the message has none that can be stored, one made from it.
        is_valid: the message's id can be a job id.
        is_claim_check: it came through the outbox; anything else is a plain Celery message.
        redelivered: the broker delivered this message before.
        queue: where it came from, as far as the routing tells.
    """

    job_id: str
    is_valid: bool
    request: Mapping[str, Any]
    is_claim_check: bool
    redelivered: bool
    queue: str | None

    @classmethod
    def of(cls, job_id: str, request: Mapping[str, Any], queue: str | None) -> Delivery:
        """Read it from Celery's request.

        Arguments:
            queue: where it came from, as far as that is known.
        """
        info = request.get("delivery_info") or {}
        usable = is_storable(job_id, MAX_JOB_ID)
        if not usable:
            digest = hashlib.sha256(repr(job_id).encode("utf-8", "replace")).hexdigest()
            job_id = f"invalid-{digest[:32]}"
        return cls(
            job_id=job_id,
            is_valid=usable,
            # A copy: the request is filled with the job's own headers later.
            request=dict(request),
            is_claim_check=request.get(VERSION_HEADER) is not None,
            redelivered=bool(info.get("redelivered")),
            queue=queue,
        )

    @property
    def attempts_before(self) -> int:
        """Attempts that the job had when the message was published."""
        return int(self.request.get("retries") or 0)

    @property
    def expires_at(self) -> datetime | None:
        """When the message says that it expires."""
        value = self.request.get("expires")
        if value is None:
            return None
        moment: datetime = maybe_iso8601(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
