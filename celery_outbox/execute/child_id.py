"""Ids for jobs that follow from a job, the same each time they are sent."""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter

#: Namespace of derived ids (RFC 9562 section 6.5: any fixed UUID serves).
_NAMESPACE = uuid.UUID("b7d9b2ae-6c2f-5f3e-9c0e-0f5e4e8f2a11")


class ChildIds:
    """Derives ids from parent, task, message and ordinal.

    A callback that is sent a second time, because a worker died between the settle and the
    ack, gets the id of the first and is absorbed by the primary key.
    """

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()

    def next_id(self, parent_id: str, task: str, body: bytes) -> str:
        """The id of the next such child; equal children differ by their ordinal."""
        digest = hashlib.sha256(body).hexdigest()
        ordinal = self._seen[task, digest]
        self._seen[task, digest] += 1
        return str(uuid.uuid5(_NAMESPACE, f"{parent_id}|{task}|{digest}|{ordinal}"))
