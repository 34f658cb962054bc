"""What a chord's state is, and what its body gets: pure functions of what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

#: The position of a member whose message names none: after the others.
LAST = 2**31 - 1


class ChordState(str, Enum):
    """Where a chord stands."""

    #: Members of its header are still to end.
    OPEN = "open"
    #: All members have ended, at least one of them in an error, which was reported. A member that
    #: is replayed and succeeds may still complete it.
    FAILED = "failed"
    #: All members have succeeded, and the body is recorded.
    DONE = "done"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Part:
    """A member of a header that has ended."""

    job_id: str
    succeeded: bool
    result: bytes | None = field(repr=False)
    result_type: str | None


def first_failed(parts: Sequence[Part]) -> Part | None:
    """The member whose error the chord ends with: the first by position."""
    return next((part for part in parts if not part.succeeded), None)


def results_of(parts: Sequence[tuple[str, Any]], structure: Sequence[Any] | None) -> list[Any]:
    """What the body is called with.

    Arguments:
        parts: ids of members with their results, by position.
        structure: ids, in lists where groups are nested; ``None``: the header is flat.
    """
    flat = [result for _, result in parts]
    if structure is None:
        return flat
    found = dict(parts)
    nested = _nested(structure, found)
    # A member that goes by another id than the call knew.
    return flat if nested is None else nested


def _nested(structure: Sequence[Any], found: Mapping[str, Any]) -> list[Any] | None:
    results: list[Any] = []
    for each in structure:
        if isinstance(each, str):
            if each not in found:
                return None
            results.append(found[each])
        else:
            inner = _nested(each, found)
            if inner is None:
                return None
            results.append(inner)
    return results
