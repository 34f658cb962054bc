"""The command line, in this process: what people read and what scripts read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_outbox import Outbox
from celery_outbox.core.reasons import Reason
from celery_outbox.operate import cli
from celery_outbox.operate.logs import JsonFormatter
from celery_outbox.operate.printing import answers
from celery_outbox.store import locks, quarantining
from tests.factories import Database, add_task, open_outbox

Run = Callable[..., Result]


@pytest.fixture
def outbox(sqlite_installed_url: str) -> Iterator[Outbox]:
    """An outbox with three jobs: waiting, quarantined, and of another task."""
    with open_outbox(sqlite_installed_url, init=False) as outbox:
        export = add_task(outbox.app)
        other = add_task(outbox.app, name="shop.import")
        export.apply_async(("secret argument",), task_id="export-1")
        export.apply_async(task_id="export-2", queue="slow")
        other.apply_async(task_id="import-1")
        Database(outbox.engine, outbox.tables).do(
            quarantining.quarantine_waiting,
            "export-2",
            attempt=0,
            actor="dispatcher",
            reason=Reason.UNROUTABLE,
            error_code="unroutable",
            copy=False,
        )
        yield outbox


@pytest.fixture
def run(outbox: Outbox) -> Run:
    """Runs ``celery -A app outbox ...``."""
    context = CLIContext(app=outbox.app, no_color=True, workdir=None, quiet=False)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli.outbox, arguments, obj=context, catch_exceptions=False)

    return run


def rows(result: Result) -> list[dict[str, Any]]:
    """The JSON that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_list_shows_the_newest_first(run: Run) -> None:
    assert [row["id"] for row in rows(run("list", "--json"))] == [
        "import-1",
        "export-2",
        "export-1",
    ]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--state", "queued"], {"export-1", "import-1"}),
        (["--state", "quarantined"], {"export-2"}),
        (["--task", "shop.export"], {"export-1", "export-2"}),
        (["--queue", "slow"], {"export-2"}),
        (["--error-code", "unroutable"], {"export-2"}),
        (["--older-than", "3600"], set()),
        (["--older-than", "0"], {"export-1", "export-2", "import-1"}),
        (["--limit", "1"], {"import-1"}),
    ],
)
def test_list_filters(run: Run, filters: list[str], found: set[str]) -> None:
    assert {row["id"] for row in rows(run("list", "--json", *filters))} == found


def test_tables_for_people_have_a_line_for_each_job(run: Run) -> None:
    lines = run("list").output.splitlines()
    assert lines[0].split() == ["id", "task", "queue", "state", "attempt", "recorded_at"]
    assert len(lines) == 4
    assert "export-2" in run("quarantine", "list").output
    assert "unroutable" in run("quarantine", "show", "export-2").output
    assert "recorded" in run("journal", "export-1").output


@pytest.mark.parametrize(("seconds", "asked"), [(30, False), (90, True)])
def test_status_asks_for_the_dispatcher_where_nobody_publishes(
    outbox: Outbox, seconds: int, asked: bool
) -> None:
    job = outbox.job("export-1")
    published = dict(answers(job, job.available_at + timedelta(seconds=seconds)))["published"]
    assert published.startswith(f"not yet, due {job.available_at.isoformat()}")
    assert ("does a dispatcher run?" in published) == asked


def test_quarantine_entries_carry_what_a_script_needs(run: Run) -> None:
    [entry] = rows(run("quarantine", "list", "--json"))
    assert list(entry) == [
        "id",
        "task",
        "queue",
        "reason",
        "error_code",
        "attempt",
        "at",
        "source",
    ]
    assert (entry["reason"], entry["source"]) == ("unroutable", "broker")
    assert entry == rows(run("quarantine", "show", "export-2", "--json"))


def test_replay_and_discard_say_what_they_did(run: Run, outbox: Outbox) -> None:
    assert "export-2 is queued again" in run("quarantine", "replay", "export-2").output
    assert outbox.job("export-2").state == "queued"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["quarantine", "replay", "export-1"], "is queued: replay is only possible while"),
        (["quarantine", "discard", "export-1"], "is queued: discard is only possible while"),
        (["quarantine", "show", "export-1"], "is queued"),
        (["cancel", "export-2"], "is quarantined: cancel is only possible while"),
    ],
)
def test_the_wrong_state_is_an_error_that_says_which_is_right(
    run: Run, arguments: list[str], complaint: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert complaint in result.output


def test_every_command_answers_in_json(run: Run) -> None:
    assert rows(run("init", "--json")) == {"made": False}
    assert rows(run("cancel", "--json", "import-1")) == [{"id": "import-1", "state": "cancelled"}]
    assert rows(run("quarantine", "replay", "--json", "export-2")) == [
        {"id": "export-2", "state": "queued"}
    ]


def test_one_job_that_cannot_be_replayed_does_not_stop_the_others(run: Run, outbox: Outbox) -> None:
    result = run("quarantine", "replay", "no-such-job", "export-1", "export-2")
    assert result.exit_code == 1
    assert "There is no job 'no-such-job'" in result.output
    assert "export-1" in result.output
    assert outbox.job("export-2").state == "queued"


def test_dispatch_says_in_json_what_it_did_and_why_it_stopped(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "log_to_stderr", lambda level, as_json: None)
    result = run("dispatch", "--once", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["outage"] is not None


def test_the_dispatchers_log_can_be_json() -> None:
    record = logging.LogRecord("celery_outbox", logging.INFO, "", 0, "outbox.x n=1", (), None)
    record.outbox_event, record.outbox_n = "outbox.x", 1
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["n"], line["level"]) == ("outbox.x", 1, "INFO")


def test_journal_names_who_did_it(run: Run) -> None:
    run("cancel", "export-1")
    last = rows(run("journal", "export-1", "--json"))[-1]
    assert (last["event"], last["state"]) == ("cancelled", "cancelled")
    assert "@" in last["actor"]


def test_maintain_says_what_it_did(run: Run) -> None:
    assert rows(run("maintain", "--json")) == {
        "rescued": 0,
        "quarantined": 0,
        "expired": 0,
        "republished": 0,
        "counted": 0,
        # The parked job that every test here has.
        "reported": 1,
        "left_to": None,
    }


def test_maintain_leaves_it_to_a_dispatcher_that_does_it(run: Run, outbox: Outbox) -> None:
    outbox.database.write(
        lambda c: locks.hold(c, outbox.tables, locks.MAINTENANCE, holder="dispatcher", ttl=60)
    )
    assert rows(run("maintain", "--json"))["left_to"] == "dispatcher"
    assert "dispatcher does the maintenance" in run("maintain").output


def test_no_command_shows_arguments(run: Run) -> None:
    commands = (["status", "export-1"], ["journal", "export-1"], ["list"], ["quarantine", "list"])
    for command in commands:
        for extra in ([], ["--json"]):
            assert "secret" not in run(*command, *extra).output


@pytest.mark.parametrize("arguments", [["list", "--state", "lost"], ["list", "--limit", "many"]])
def test_a_bad_option_is_a_usage_error(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
