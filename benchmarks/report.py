"""The table that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.arithmetic import Spread
from benchmarks.results import Bar, Line, Section


def table(section: Section) -> str:
    """One section: contenders with their ratios, bars, and what a reader must know."""
    parts = [section.title, "=" * len(section.title)]
    if section.lines:
        parts += _columns(_rows(section), right=(1, 2, 3))
    if section.bars:
        parts += ["", *_columns(bar_rows(section.bars), right=(1, 2, 3))]
    parts += [f"* {note}" for note in section.notes]
    return "\n".join(parts)


def summary(sections: Iterable[Section]) -> str:
    """All bars of a run, one below the other."""
    rows = [row for section in sections for row in bar_rows(section.bars)]
    return "\n".join(_columns(rows, right=(1, 2, 3)))


def bar_rows(bars: Iterable[Bar]) -> list[tuple[str, ...]]:
    """What, found, spread, limit, and whether it is met."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    return [
        (
            bar.what,
            "-" if bar.value is None else _number(bar.value.median, bar.measure),
            _range(bar.value, bar.measure),
            f"{'<=' if bar.at_most else '>='} {_number(bar.limit, bar.measure)}",
            words[bar.met],
        )
        for bar in bars
    ]


def _rows(section: Section) -> Iterator[tuple[str, ...]]:
    yield ("", "ratio", "spread", section.rate, "what one is")
    for line in section.lines:
        yield (line.name, *_figures(section, line), line.does if not line.failed else _why(line))


def _figures(section: Section, line: Line) -> tuple[str, str, str]:
    if not line.rates:
        return ("-", "", "")
    found = section.ratio(line.name, line.unit)
    rate = f"{Spread.of(line.rates).median:,.0f}"
    if found is None:
        return ("-", "", rate)
    return (_number(found.median, "x"), _range(found, "x"), rate)


def _why(line: Line) -> str:
    return f"FAILED: {(line.failed or '').strip().splitlines()[-1]}"


def _number(value: float, measure: str) -> str:
    if measure == "x":
        return f"{value:.2f}"
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"
    return f"{text} {measure}".rstrip()


def _range(found: Spread | None, measure: str) -> str:
    if found is None or found.least == found.most:
        return ""
    return f"{_number(found.least, measure)} - {_number(found.most, measure)}"


def _columns(rows: Iterable[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows of cells below each other; the last column is as long as it is."""
    cells = [list(row) for row in rows]
    if not cells:
        return []
    widths = [max(len(row[index]) for row in cells) for index in range(len(cells[0]))]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
