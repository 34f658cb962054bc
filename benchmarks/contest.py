"""Contenders that are measured in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.arithmetic import rotated
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
        run: measures one round; returns operations per second.
        unit: the name of the contender that is 1.00 for it.
    """

    name: str
    role: str
    does: str
    run: Callable[[], float]
    unit: str


def compete(contenders: Sequence[Contender], rounds: int, say: Say) -> list[Line]:
    """Measure all in turn: A B C, then B C A, then C A B, so that what changes on the machine
    hits all of them. One that fails is left out from then on; the others go on.
    """
    lines = {
        each.name: Line(each.name, each.role, each.does, unit=each.unit) for each in contenders
    }
    runs = {each.name: each.run for each in contenders}
    for number in range(rounds):
        for name in rotated(list(lines), number):
            line = lines[name]
            if line.failed is not None:
                continue
            try:
                rate = runs[name]()
            except Exception as error:
                line.failed = f"{type(error).__name__}: {error}"
                say(f"round {number + 1}/{rounds}  {name}: failed, {line.failed}")
                continue
            line.rates.append(rate)
            say(f"round {number + 1}/{rounds}  {name}: {rate:,.0f}/s")
    return list(lines.values())
