"""Where in the headers of chords a job or a signature stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from celery_outbox.core.chords import LAST


class Member(NamedTuple):
    """A place in the header of a chord."""

    chord_id: str
    job_id: str
    position: int


def places_in(signature: Any) -> list[Member]:
    """The places in the headers of chords that a signature fills when it has run."""
    if not isinstance(signature, Mapping):
        return []
    kind, kwargs = signature.get("subtask_type"), signature.get("kwargs") or {}
    if kind == "chain":
        steps = list(kwargs.get("tasks") or ())
        return places_in(steps[-1]) if steps else []
    if kind == "group":
        return [place for task in kwargs.get("tasks") or () for place in places_in(task)]
    if kind == "chord":
        return places_in(kwargs.get("body"))
    options = signature.get("options") or {}
    if options.get("chord") and options.get("group_id") and options.get("task_id"):
        return [_member(options["group_id"], options["task_id"], options.get("group_index"))]
    return []


def chord_option(signature: Any, job_id: str) -> Any:
    """The body of the chord in whose header a job is, somewhere in a signature."""
    options, kwargs = signature.get("options") or {}, signature.get("kwargs") or {}
    if options.get("task_id") == job_id and options.get("chord"):
        return options["chord"]
    for part in [*(kwargs.get("tasks") or ()), kwargs.get("body")]:
        found = chord_option(part, job_id) if isinstance(part, Mapping) else None
        if found is not None:
            return found
    return None


def places_of(request: Any) -> list[Member]:
    """Where a step of a chain that will not run is expected; a group with all its tasks."""
    tasks = (request.kwargs or {}).get("tasks") if _kind(request) == "group" else None
    found = [place for task in tasks or () for place in places_in(task)]
    return found or [place_of(request)]


def _kind(request: Any) -> Any:
    return getattr(request, "subtask_type", None)


def place_of(request: Any) -> Member:
    """Where a job is expected that is a member itself."""
    return _member(request.group, request.id, request.group_index)


def _member(chord_id: str, job_id: str, index: Any) -> Member:
    return Member(chord_id, job_id, LAST if index is None else int(index))
