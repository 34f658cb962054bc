"""Draws the rate of dispatch against the backlog."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

#: Rows, and the median, the lowest and the highest rate.
Point = tuple[int, float, float, float]


def is_possible() -> bool:
    """Whether what draws is installed."""
    return find_spec("matplotlib") is not None


def write(series: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write an SVG.

    Arguments:
        series: each contender's points, by backlog.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series.items():
        sizes = [point[0] for point in points]
        axes.plot(sizes, [point[1] for point in points], marker="o", label=name)
        axes.fill_between(
            sizes, [point[2] for point in points], [point[3] for point in points], alpha=0.15
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("backlog, rows")
    axes.set_ylabel("messages/s, confirmed")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="svg", metadata={"Date": None})
