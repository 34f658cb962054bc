"""The one line that says whether a failure was survived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        title: the failure.
        finding: what holds when nothing is wrong.
        wrong: what should hold and does not.
    """

    title: str
    finding: str
    wrong: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything holds that should."""
        return not self.wrong

    def __str__(self) -> str:
        if self.ok:
            return f"OK     {self.title}: {self.finding}"
        return f"WRONG  {self.title}: it does not hold that {'; that '.join(self.wrong)}"


def judge(title: str, finding: str, claims: Mapping[str, bool]) -> Verdict:
    """A verdict on claims, each with whether it holds."""
    return Verdict(title, finding, tuple(text for text, holds in claims.items() if not holds))
