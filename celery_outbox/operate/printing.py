"""How the command line prints what it knows: for people, and for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

import click

from celery_outbox.core.states import State
from celery_outbox.operate.status import JobStatus

#: A dispatcher that runs, and a broker that answers, are faster.
_LATE = timedelta(minutes=1)


def answers(job: JobStatus, now: datetime) -> list[tuple[str, Any]]:
    """What ``status`` says of a job: the five questions, and what else is known.

    Arguments:
        now: by any clock: it decides only whether to ask for the dispatcher.
    """
    stopped = None
    if job.reason is not None:
        stopped = f"{job.reason} ({job.error_code or 'no error code'})"
    elif job.state == str(State.RETRYING):
        stopped = f"it has not: next attempt {job.available_at.isoformat()} after {job.error_code}"
    lease = None
    if job.lease is not None:
        lease = f"{job.lease.by} until {job.lease.until.isoformat()} (token {job.lease.token})"
    result = "none"
    if job.state == str(State.SUCCEEDED) and job.finished_at is not None:
        result = f"stored {job.finished_at.isoformat()}"
    return [
        ("job", f"{job.id} ({job.task})"),
        ("state", job.state),
        ("recorded", job.recorded_at.isoformat()),
        ("published", _published(job, now)),
        ("deliveries", f"{job.deliveries} (attempt {job.attempt} of {job.max_attempts})"),
        ("result", result + (f", key {job.result_key}" if job.result_key else "")),
        ("why stopped", stopped),
        ("lease", lease),
        ("queue", job.queue),
    ]


def _published(job: JobStatus, now: datetime) -> str:
    if job.published_at is not None:
        return job.published_at.isoformat()
    # Of a client without the outbox; or its dispatcher died between the confirm and the mark.
    if job.deliveries:
        return "not marked, but delivered"
    if job.state in (str(State.QUEUED), str(State.RETRYING)):
        late = "; does a dispatcher run?" if now - job.available_at > _LATE else ""
        return f"not yet, due {job.available_at.isoformat()}{late}"
    return "never"


def print_fields(fields: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one a line."""
    for name, value in fields:
        click.echo(f"{name:<12}{_cell(value)}")


def print_json(value: Any) -> None:
    """Print what scripts read."""
    click.echo(json.dumps(value, indent=2))


def print_rows(rows: list[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    """Print a table, or JSON with everything.

    Arguments:
        columns: of the table, in this order.
    """
    if as_json:
        print_json(rows)
        return
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    widths = [
        max([len(column), *(len(line[index]) for line in cells)])
        for index, column in enumerate(columns)
    ]
    for line in [list(columns), *cells]:
        click.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
