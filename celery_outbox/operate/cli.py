"""``celery -A app outbox ...``"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from functools import wraps
from typing import Any

import click
from sqlalchemy.exc import DBAPIError

from celery_outbox.app import Outbox
from celery_outbox.core.states import State
from celery_outbox.exceptions import ConfigurationError, OutboxError
from celery_outbox.operate.daemon import until_signalled
from celery_outbox.operate.logs import log_to_stderr
from celery_outbox.operate.printing import answers, print_fields, print_json, print_rows
from celery_outbox.operate.status import QuarantineEntry, as_plain

JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
LIMIT = click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="At most so many.",
)


@click.group(name="outbox")
@click.pass_context
def outbox(context: click.Context) -> None:
    """Record, dispatch and look after the jobs of this app.

    \b
    Examples:
      celery -A shop outbox init
      celery -A shop outbox dispatch
      celery -A shop outbox status export-42
    """
    app = context.obj.app
    # Tasks and an explicit Outbox(app, ...) live in the app's modules.
    app.loader.import_default_modules()
    app.finalize()
    context.obj = found = Outbox.of(app)
    try:
        _ = found.engine
    except ConfigurationError as error:
        raise click.ClickException(f"{error} (app {app.main!r}: is -A right?)") from error
    if not any(hasattr(task, "outbox") for task in app.tasks.values()):
        click.echo(
            f"Warning: no task of app {app.main!r} is an OutboxTask, so no call is recorded: "
            'use Celery(..., task_cls="celery_outbox:OutboxTask").',
            err=True,
        )


def command(name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A subcommand whose expected errors end in one line and exit code 1."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with _readable_errors():
                return function(*args, **kwargs)

        return outbox.command(name)(click.pass_obj(guarded))

    return decorate


@contextmanager
def _readable_errors() -> Iterator[None]:
    try:
        yield
    except OutboxError as error:
        raise click.ClickException(str(error)) from error
    except DBAPIError as error:
        # The driver's first line; the statement and its parameters stay out of sight.
        text = str(error.orig).strip().partition("\n")[0]
        raise click.ClickException(f"The database cannot be used: {text}") from error


@command("init")
@JSON
def init(outbox: Outbox, as_json: bool) -> None:
    """Make the outbox tables; safe to repeat."""
    made = outbox.init()
    if as_json:
        print_json({"made": made})
        return
    click.echo("The outbox tables are ready." if made else "The outbox tables were there already.")


@command("dispatch")
@click.option("--once", is_flag=True, help="Publish what is due and exit.")
@click.option("--loglevel", default="INFO", show_default=True, help="Level of the log.")
@click.option("--json", "as_json", is_flag=True, help="Log, and answer --once, in JSON.")
def dispatch(outbox: Outbox, once: bool, loglevel: str, as_json: bool) -> None:
    """Publish recorded jobs until SIGTERM or Ctrl-C."""
    log_to_stderr(loglevel, as_json)
    dispatcher = outbox.dispatcher()
    work: Callable[[], Any] = dispatcher.drain if once else dispatcher.run
    # A batch waits at most twice for the broker: to connect, and for its confirms.
    done = until_signalled(dispatcher, work, grace=2 * outbox.config.publish_timeout)
    if not once:
        return
    if as_json:
        outage = None if done.outage is None else type(done.outage).__name__
        print_json({"published": done.published, "refused": done.refused, "outage": outage})
    else:
        click.echo(f"published {done.published}, refused {done.refused}")
    if done.outage is not None:
        raise click.ClickException(
            f"The broker cannot be used ({type(done.outage).__name__}: {done.outage}); "
            "what is not published stays in the database."
        )


@command("maintain")
@JSON
def maintain(outbox: Outbox, as_json: bool) -> None:
    """Take back the jobs of silent workers, publish lost messages again, and end what has
    expired. A running dispatcher does all this by itself."""
    done = outbox.maintenance.run()
    if as_json:
        print_json(asdict(done))
        return
    if done.left_to is not None:
        click.echo(f"Nothing to do: {done.left_to} does the maintenance.")
        return
    counts = {what: count for what, count in asdict(done).items() if what != "left_to"}
    click.echo(", ".join(f"{what} {count}" for what, count in counts.items()))


@command("status")
@click.argument("job_id")
@JSON
def status(outbox: Outbox, job_id: str, as_json: bool) -> None:
    """Where is JOB_ID: recorded, published, deliveries, result, why stopped."""
    job = outbox.job(job_id)
    if as_json:
        print_json(job.as_json())
        return
    print_fields(answers(job, datetime.now(timezone.utc)))


@command("journal")
@click.argument("job_id")
@JSON
def journal(outbox: Outbox, job_id: str, as_json: bool) -> None:
    """Everything that happened to JOB_ID, oldest first."""
    events = [as_plain(asdict(event)) for event in outbox.control.journal(job_id)]
    print_rows(
        events, ("at", "event", "state", "attempt", "reason", "error_code", "actor"), as_json
    )


@command("list")
@click.option("--state", type=click.Choice([str(state) for state in State]), help="In this state.")
@click.option("--task", help="Of this task.")
@click.option("--queue", help="For this queue.")
@click.option("--error-code", help="With this error.")
@click.option("--older-than", type=float, metavar="SECONDS", help="Recorded so long ago.")
@LIMIT
@JSON
def list_jobs(outbox: Outbox, older_than: float | None, as_json: bool, **filters: Any) -> None:
    """The newest jobs, newest first."""
    age = None if older_than is None else timedelta(seconds=older_than)
    found = [job.as_json() for job in outbox.control.find(older_than=age, **filters)]
    print_rows(found, ("id", "task", "queue", "state", "attempt", "recorded_at"), as_json)


@command("cancel")
@click.argument("job_ids", nargs=-1, required=True)
@JSON
def cancel(outbox: Outbox, job_ids: Sequence[str], as_json: bool) -> None:
    """Take JOB_IDS back before they run."""
    _each(outbox, job_ids, outbox.control.cancel, "is cancelled", as_json)


@outbox.group("quarantine")
def quarantine() -> None:
    """Jobs that wait for a person."""


def quarantine_command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A subcommand of ``quarantine``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with _readable_errors():
                return function(*args, **kwargs)

        return quarantine.command(name)(click.pass_obj(guarded))

    return decorate


@quarantine_command("list")
@click.option("--task", help="Of this task.")
@click.option("--queue", help="For this queue.")
@LIMIT
@JSON
def quarantine_list(outbox: Outbox, as_json: bool, **filters: Any) -> None:
    """The newest jobs in quarantine, newest first."""
    found = [entry.as_json() for entry in outbox.control.quarantined(**filters)]
    print_rows(found, ("id", "task", "queue", "reason", "error_code", "attempt", "at"), as_json)


@quarantine_command("show")
@click.argument("job_id")
@JSON
def quarantine_show(outbox: Outbox, job_id: str, as_json: bool) -> None:
    """Why JOB_ID is in quarantine."""
    entry: QuarantineEntry = outbox.control.quarantine_entry(job_id)
    if as_json:
        print_json(entry.as_json())
        return
    print_fields(entry.as_json().items())


@quarantine_command("replay")
@click.argument("job_ids", nargs=-1, required=True)
@JSON
def quarantine_replay(outbox: Outbox, job_ids: Sequence[str], as_json: bool) -> None:
    """Send JOB_IDS back to the queue, with all their attempts before them."""
    _each(outbox, job_ids, outbox.control.replay, "is queued again", as_json)


@quarantine_command("discard")
@click.argument("job_ids", nargs=-1, required=True)
@JSON
def quarantine_discard(outbox: Outbox, job_ids: Sequence[str], as_json: bool) -> None:
    """Give JOB_IDS up; the journal keeps why they were in quarantine."""
    _each(outbox, job_ids, outbox.control.discard, "is discarded", as_json)


def _each(
    outbox: Outbox,
    job_ids: Sequence[str],
    act: Callable[[str], None],
    done: str,
    as_json: bool,
) -> None:
    """Act on each job; one that cannot be acted on does not stop the others."""
    results: list[dict[str, Any]] = []
    for job_id in job_ids:
        try:
            act(job_id)
        except OutboxError as error:
            results.append({"id": job_id, "error": str(error)})
            click.echo(f"Error: {error}", err=True)
            continue
        results.append({"id": job_id, "state": outbox.job(job_id).state})
        if not as_json:
            click.echo(f"{job_id} {done}.")
    if as_json:
        print_json(results)
    if any("error" in result for result in results):
        raise click.exceptions.Exit(1)
