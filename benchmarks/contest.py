"""Contenders that are measured in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.arithmetic import rotated, together
from benchmarks.results import Line

#: Tells the person who waits what happens.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Contender:
    """Somebody who can be measured once more.

    Attributes:
        name: unique in its section.
        role: see :mod:`benchmarks.results`.
        does: what exactly one operation is.
        run: measures some operations, as many each time; returns operations per second.
        unit: the name of the contender that is 1.00 for it.
    """

    name: str
    role: str
    does: str
    run: Callable[[], float]
    unit: str


def compete(
    contenders: Sequence[Contender], rounds: int, say: Say, *, slices: int = 1
) -> list[Line]:
    """Measure all in turn: A B C, then B C A, then C A B, so that what changes on the machine
    hits all of them. One that fails is left out from then on; the others go on.

    Arguments:
        slices: how often each is measured in a round, in turn too; where one measurement is short
            the machine changes less between two contenders.
    """
    lines = {
        each.name: Line(each.name, each.role, each.does, unit=each.unit) for each in contenders
    }
    runs = {each.name: each.run for each in contenders}
    for number in range(rounds):
        rates: dict[str, list[float]] = {name: [] for name in lines}
        for part in range(slices):
            for name in rotated(list(lines), number * slices + part):
                if lines[name].failed is None:
                    try:
                        rates[name].append(runs[name]())
                    except Exception as error:
                        lines[name].failed = f"{type(error).__name__}: {error}"
                        say(f"round {number + 1}/{rounds}  {name}: failed, {error}")
                if len(rates[name]) == slices:
                    rate = together(rates[name])
                    lines[name].rates.append(rate)
                    say(f"round {number + 1}/{rounds}  {name}: {rate:,.0f}/s")
    return list(lines.values())
