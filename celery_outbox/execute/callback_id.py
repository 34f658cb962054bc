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
        fix_ids(f"{job_id}|{role}|{number}", callback)


def fix_ids(name: str, signature: Any) -> None:
    """Give a signature, and every part of it that will be called, an id; those that have one keep
    it.

    Arguments:
        name: names the signature; the ids are computed from it and from the place inside.
        signature: as a message has it; changed in place.
    """
    if not isinstance(signature, dict):
        return
    options = signature.setdefault("options", {})
    kwargs = signature.get("kwargs") or {}
    kind = signature.get("subtask_type")
    if kind != "chain":
        # A chain has the id of its last step.
        options.setdefault("task_id", str(uuid.uuid5(_CALLBACKS, name)))
    parts: list[Any] = []
    if kind in ("chain", "group"):
        parts = list(kwargs.get("tasks") or ())
    elif kind == "chord":
        header = kwargs.get("header")
        # As a list, or as the group that it was made to.
        tasks = (header.get("kwargs") or {}).get("tasks") if isinstance(header, dict) else header
        parts = [*(tasks or ()), kwargs.get("body")]
        if isinstance(header, dict):
            header.setdefault("options", {}).setdefault("task_id", options["task_id"])
    for number, part in enumerate(parts):
        fix_ids(f"{name}|{number}", part)
    for role in ("link", "link_error"):
        callbacks = options.get(role)
        each = [callbacks] if isinstance(callbacks, dict) else list(callbacks or ())
        for number, callback in enumerate(each):
            fix_ids(f"{name}|{role}|{number}", callback)
