"""``python -m benchmarks``: measure, show, and write down."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from click import echo

from benchmarks import machine, report
from benchmarks.registry import SECTIONS
from benchmarks.results import Section
from benchmarks.stage import Stage, open_stage


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0; 1: something could not be measured; 130: it was interrupted. Bars that are not met
        are no error.
    """
    options = _parser().parse_args(arguments)
    if options.list:
        for name, (_, title) in SECTIONS.items():
            echo(f"{name:<16}{title}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    names = options.only or list(SECTIONS)
    size = "quick" if options.quick else "full" if options.full else "default"
    document: dict[str, Any] = {
        **machine.describe(),
        "size": size,
        "rounds": options.rounds,
        "sections": [],
    }
    sections: list[Section] = []
    code = 0
    try:
        with open_stage() as stage:
            for name in names:
                section = _measure(stage, name, size, options.rounds)
                if section is None:
                    code = 1
                    continue
                sections.append(section)
                if any(line.failed for line in section.lines):
                    code = 1
                echo("\n" + report.table(section) + "\n")
                document["sections"].append(section.as_json())
                _write(document, options.json)
    except KeyboardInterrupt:
        echo("\ninterrupted; what was measured so far:")
        code = 130
    if sections:
        echo("\n" + report.summary(sections))
    if options.plot is not None:
        _plot(sections, options.plot)
    return code


def _measure(stage: Stage, name: str, size: str, rounds: int) -> Section | None:
    run, title = SECTIONS[name]
    began = time.monotonic()
    echo(f"-- {name}: {title}")

    def say(text: str) -> None:
        echo(f"{time.monotonic() - began:6.0f} s  {name}  {text}")

    try:
        return run(stage, size, rounds, say)
    except Exception:
        # The other sections are worth their figures all the same.
        echo(f"{name} could not be measured:\n{traceback.format_exc()}")
        return None


def _write(document: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def _plot(sections: Sequence[Section], path: Path) -> None:
    from benchmarks import plot

    found = [section for section in sections if section.name == "dispatch-plot"]
    if not found:
        echo("no plot: dispatch-plot was not measured")
    elif not plot.is_possible():
        echo("no plot: matplotlib is not installed")
    else:
        plot.write(found[0].facts["series"], path)
        echo(f"wrote {path}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=list(SECTIONS),
        help="measure this section; may be repeated",
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="of each contender")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small sizes, to try the code")
    size.add_argument("--full", action="store_true", help="the sizes that take long, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw dispatch-plot there (SVG)")
    parser.add_argument("--list", action="store_true", help="say what there is to measure")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
