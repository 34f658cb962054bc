"""The log of the dispatcher: lines for people, or JSON for a collector."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

import click


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line for a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "event": getattr(record, "outbox_event", None) or record.getMessage(),
        }
        for name, value in record.__dict__.items():
            if name.startswith("outbox_") and name != "outbox_event":
                line[name.removeprefix("outbox_")] = value
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_to_stderr(level: str, as_json: bool) -> None:
    """Send the log to standard error.

    Arguments:
        level: the name of a level of :mod:`logging`.
        as_json: one JSON object a line.

    Raises:
        click.BadParameter: there is no such level.
    """
    numeric = logging.getLevelName(level.upper())
    if not isinstance(numeric, int):
        raise click.BadParameter(f"{level!r} is not a log level", param_hint="--loglevel")
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=numeric, handlers=[handler])
