"""``python -m example_project``: an export over HTTP, then four failures, and how each ends."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from example_project.demonstration import demonstrate
from example_project.prepare import Unusable
from example_project.settings import Settings

UNUSABLE = 2
#: What a shell reports for a process that Ctrl-C ended.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0: all is well; 1: a verdict is wrong; 2: bad options or servers."""
    options = _parser().parse_args(arguments)
    try:
        folder = _make_folder(options.keep)
    except OSError as error:
        print(f"--keep: {error.strerror}: {options.keep}", file=sys.stderr)
        return UNUSABLE
    # SIGTERM clears up as Ctrl-C does.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        print("celery-outbox: exports that survive")
        print(f"  folder    {folder}")
        settings = Settings.of(folder, options.database, options.broker)
        return 0 if demonstrate(settings) else 1
    except Unusable as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m example_project",
        description="Make an export over HTTP, then kill real processes at four places and look "
        "at what the database, the broker and the files show. Needs no server.",
    )
    parser.add_argument(
        "--database",
        metavar="URL",
        help="SQLAlchemy URL, such as postgresql+psycopg2://user:password@host/name; tables "
        "whose names start with example_ are made anew (default: SQLite in the folder)",
    )
    parser.add_argument(
        "--broker",
        metavar="URL",
        help="such as amqp://user:password@host// or redis://host/0; queues whose names start "
        "with example_ are made anew (default: files in the folder)",
    )
    parser.add_argument(
        "--keep",
        metavar="FOLDER",
        help="use this folder, which must be new or empty, and keep it (default: a temporary "
        "folder that is removed at the end)",
    )
    return parser


def _make_folder(keep: str | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="celery-outbox-example-"))
    folder = Path(keep).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OSError(0, "the folder is not empty")
    return folder


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
