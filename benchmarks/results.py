"""What a section has found: lines of figures, bars that they are held against, and facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.arithmetic import Spread, ratios

#: What a contender is.
UNIT, OURS, PEER, FLOOR = "unit", "ours", "peer", "floor"


@dataclass
class Line:
    """One contender's rounds.

    Attributes:
        name: of the contender.
        role: one of the four words above.
        does: what exactly one operation is.
        rates: of each round, in ``unit`` of the section; more is faster.
        unit: the name of the contender that is 1.00.
        failed: why it has no, or not all, rounds.
    """

    name: str
    role: str
    does: str
    rates: list[float] = field(default_factory=list)
    unit: str = ""
    failed: str | None = None


@dataclass
class Bar:
    """A figure that must be reached.

    Attributes:
        what: is measured.
        value: found; ``None``: it could not be measured.
        limit: must be reached.
        at_most: it must not be exceeded, in place of reached.
        measure: what the numbers are: ``"x"`` a multiple, or a unit.
    """

    what: str
    value: Spread | None
    limit: float
    at_most: bool = False
    measure: str = "x"

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the limit; ``None``: nobody knows."""
        if self.value is None:
            return None
        if self.at_most:
            return self.value.median <= self.limit
        return self.value.median >= self.limit


@dataclass
class Section:
    """All that one section has found.

    Attributes:
        name: as ``--only`` takes it.
        title: what is measured, in a few words.
        rate: what a rate counts, such as ``jobs/s``.
        lines: the contenders.
        bars: what the figures are held against.
        facts: counts, plans and whatever else is exact; by name.
        notes: what a reader must know of the figures.
    """

    name: str
    title: str
    rate: str
    lines: list[Line] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def line(self, name: str) -> Line | None:
        """The line of a contender, if it has at least one round."""
        return next((each for each in self.lines if each.name == name and each.rates), None)

    def ratio(self, name: str, unit: str) -> Spread | None:
        """A contender's rate as a multiple of another's; ``None``: one of them has no round."""
        line, base = self.line(name), self.line(unit)
        if line is None or base is None:
            return None
        return Spread.of(ratios(line.rates, base.rates))

    def hold(self, what: str, name: str, unit: str, limit: float) -> None:
        """Add a bar: a contender must be so many times as fast as another."""
        self.bars.append(Bar(what, self.ratio(name, unit), limit))

    def ahead(self, name: str, peers: Sequence[str]) -> None:
        """Add a bar for each peer that was measured: it must not be faster."""
        for peer in peers:
            if self.line(peer) is not None:
                self.hold(f"{name}: ahead of {peer}", name, peer, 1.0)

    def as_json(self) -> dict[str, Any]:
        """Everything, raw rounds included, as plain values."""
        plain = asdict(self)
        for line, described in zip(self.lines, plain["lines"], strict=True):
            found = self.ratio(line.name, line.unit) if line.unit else None
            described["ratio"] = None if found is None else asdict(found)
        for bar, described in zip(self.bars, plain["bars"], strict=True):
            described["met"] = bar.met
        return plain
