"""From measured rounds to ratios; nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """A figure of several rounds.

    Attributes:
        median: of all rounds.
        least: of all rounds.
        most: of all rounds.
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value.

        Raises:
            ValueError: there is no value.
        """
        if not values:
            raise ValueError("a spread needs a value")
        return cls(median(values), min(values), max(values))


def ratios(rates: Sequence[float], unit: Sequence[float]) -> list[float]:
    """Each round's rate as a multiple of the unit's in the same round; rounds that one of the
    two did not get to are left out.

    Raises:
        ValueError: a rate of the unit is not greater than zero.
    """
    if any(rate <= 0 for rate in unit):
        raise ValueError("the unit has a rate of zero")
    return [rate / base for rate, base in zip(rates, unit, strict=False)]


def differences(values: Sequence[float], unit: Sequence[float]) -> list[float]:
    """How much more each round's value is than the unit's in the same round."""
    return [value - base for value, base in zip(values, unit, strict=False)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed.

    Arguments:
        share: more than 0, at most 1.

    Raises:
        ValueError: there is no value, or no such share.
    """
    if not values or not 0 < share <= 1:
        raise ValueError("a percentile needs values and a share of them")
    ordered = sorted(values)
    # Without the rounding errors of len * share: 0.07 of 100 values are 7.
    rank = -(-round(len(ordered) * share * 1_000_000) // 1_000_000)
    return ordered[max(rank, 1) - 1]


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names in the same circle, begun at another place: nobody is always first."""
    if not names:
        return []
    start = by % len(names)
    return [*names[start:], *names[:start]]


def together(rates: Sequence[float]) -> float:
    """The rate of as many operations at each of these rates, one after the other.

    Raises:
        ValueError: there is no rate, or one is not greater than zero.
    """
    if not rates or any(rate <= 0 for rate in rates):
        raise ValueError("each rate must be greater than zero")
    return len(rates) / sum(1 / rate for rate in rates)
