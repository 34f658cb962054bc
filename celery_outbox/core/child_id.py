"""Ids for what a running job enqueues: the same in each of its attempts."""

from __future__ import annotations

import hashlib
import uuid

#: Namespace of these ids (RFC 9562 section 6.5: any fixed UUID serves).
_CHILDREN = uuid.UUID("5b0c2c0e-54a3-5d0e-9a52-2b6f1c7f3d90")


def fingerprint(task: str, *parts: bytes) -> str:
    """What two calls have in common that ask for the same.

    Arguments:
        task: the name of the task that is called.
        parts: its arguments, and what follows it, serialized.
    """
    digest = hashlib.sha256(task.encode("utf-8", "surrogatepass"))
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def child_id(parent: str, phase: str, call: str, ordinal: int) -> str:
    """The id of a job that another one enqueues.

    Arguments:
        parent: the id of the job that enqueues it.
        phase: the part of the parent's life that it is enqueued in.
        call: the :func:`fingerprint` of the call.
        ordinal: how many equal calls came before it in that phase.
    """
    return str(uuid.uuid5(_CHILDREN, f"{parent}|{phase}|{call}|{ordinal}"))


def member_id(canvas: str, number: int) -> str:
    """The id of a member of a canvas, or of a group in it.

    Of the form of Celery's own ids: nobody has chosen it, so the calls of a transaction need not
    be written one by one to find out whose it is.

    Arguments:
        canvas: the :func:`child_id` of the whole.
        number: how many ids of the canvas came before.
    """
    digest = hashlib.sha256(f"{_CHILDREN}|{canvas}|{number}".encode()).digest()
    return str(uuid.UUID(bytes=digest[:16], version=4))
