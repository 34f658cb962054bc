"""Ids for the callbacks of a job: the same for each delivery."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

#: Namespace of callback ids (RFC 9562 section 6.5: any fixed UUID serves).
_CALLBACKS = uuid.UUID("b7d9b2ae-6c2f-5f3e-9c0e-0f5e4e8f2a11")


def fix_callback_ids(job_id: str, role: str, callbacks: Sequence[Any] | None) -> None:
    """Give callbacks their ids before Celery does.

    A callback that is sent a second time, because a worker died between settle and ack, is
    absorbed by the primary key then.

    Arguments:
        role: ``link`` or ``link_error``.
        callbacks: signatures as a message has them; changed in place.
    """
    for number, callback in enumerate(callbacks or ()):
        # Chains, groups and chords give ids to their own parts.
        if isinstance(callback, dict) and not callback.get("subtask_type"):
            options = callback.setdefault("options", {})
            name = f"{job_id}|{role}|{number}"
            options.setdefault("task_id", str(uuid.uuid5(_CALLBACKS, name)))
