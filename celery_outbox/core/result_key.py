"""The stable name under which a job's result is durable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from celery_outbox.exceptions import InvalidResultKey, InvalidStoreKey

#: Longest key, in characters (S3 permits 1,024 bytes).
MAX_KEY = 1024

#: Longest part between slashes, in bytes: what file systems take as a name.
MAX_PART = 255


def check_key(key: str) -> str:
    """Return ``key`` if every result store can use it.

    Raises:
        InvalidStoreKey: it is empty or too long, absolute, or leaves the store's root.
    """
    problem = None
    if not key or len(key) > MAX_KEY:
        problem = f"it must have 1 to {MAX_KEY} characters"
    elif any(len(part.encode("utf-8", "replace")) > MAX_PART for part in key.split("/")):
        problem = f"a part of it has more than {MAX_PART} bytes"
    elif not key.isprintable() or "\\" in key:
        problem = "it holds a control character or a backslash"
    elif key.startswith("/") or any(part in ("", ".", "..") for part in key.split("/")):
        problem = "it must be a relative path without '.', '..' or empty parts"
    if problem is not None:
        raise InvalidStoreKey(key=key, problem=problem)
    return key


def fill_result_key(
    task: str,
    template: str | None,
    job_id: str,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> str | None:
    """Fill a task's ``result_key`` template for one call.

    Arguments:
        template: such as ``reports/{job_id}.csv``; ``{0}`` and ``{name}`` stand for arguments;
            ``None``: the task has no result key.

    Raises:
        InvalidResultKey: the template names what the call does not have, or the key leaves
            the store.
    """
    if template is None:
        return None
    try:
        key = template.format(*(args or ()), **{**(kwargs or {}), "job_id": job_id})
        return check_key(key)
    except (IndexError, KeyError, AttributeError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__} ({error})"
    except InvalidStoreKey as error:
        problem = str(error)
    raise InvalidResultKey(task=task, template=template, problem=problem)
