"""Failure 4, second variant: each of three attempts ends with an error; then a good job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from example_project.play import third_attempt
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT, GOOD_ACCOUNT = 12, 13
TITLE = "4b. the third failed attempt"


def play(stage: Stage) -> Verdict:
    """Let one job fail three times, with a good one behind it."""
    heading("4b. Every attempt ends with an error; the next good job runs")
    job_id, good_id = job_of(ACCOUNT), job_of(GOOD_ACCOUNT)
    stage.begin_import(ACCOUNT)
    before = stage.broker.quarantined()
    stage.request(ACCOUNT)
    stage.request(GOOD_ACCOUNT)
    bad = stage.until(
        "the quarantine",
        job_id,
        lambda s: s.state == "quarantined" and s.quarantined > before and s.outbox_rows == 0,
    )
    show("At the end, the bad job", bad)
    good = stage.until("the good job", good_id, lambda s: s.state == "succeeded" and s.at_rest)
    show("And the good one", good)
    listed = stage.outbox_command("quarantine", "list")
    say("celery outbox quarantine list:")
    for entry in listed:
        say(f"  {entry['id']}  {entry['reason']}  {entry['error_code']}  {entry['attempt']}")
    return judge(before, bad, good, listed)


def judge(before: int, bad: Seen, good: Seen, listed: Sequence[dict[str, Any]]) -> Verdict:
    """What must hold at the end."""
    reasons = {entry["id"]: entry["reason"] for entry in listed}
    return weigh(
        TITLE,
        "three runs, then quarantine with its reason; the next good job ran",
        {
            "the job is in quarantine": bad.state == "quarantined",
            "the reason is attempts_exhausted": bad.reason == "attempts_exhausted",
            "the body ran three times": bad.runs == 3 and bad.attempt == 3,
            "a copy lies in the quarantine queue": bad.quarantined > before,
            "there is no file": bad.files == (),
            "the good job succeeded": good.state == "succeeded" and good.runs == 1,
            "it has its file": good.files == (good.file,),
            "nothing goes round in the queue": good.waiting == 0,
            "the list shows both bad jobs": reasons
            == {job_of(third_attempt.ACCOUNT): "lost_worker", bad.job_id: "attempts_exhausted"},
        },
    )
