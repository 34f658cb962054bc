"""Failure 4, first variant: the worker dies with the third attempt failed and nobody told."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 11
TITLE = "4a. killed at the third failed attempt"


def fault(marker: str) -> Fault:
    """Where the worker dies."""
    return Fault("execute.before_settle", job_of(ACCOUNT), marker, attempt=3)


def play(stage: Stage) -> Verdict:
    """Let the attempts fail, kill the worker at the third, and start another one."""
    heading("4a. The worker is killed when the third attempt has failed")
    job_id = job_of(ACCOUNT)
    stage.begin_import(ACCOUNT)
    before = stage.broker.quarantined()
    stage.request(ACCOUNT)
    stage.wait_for_death(stage.worker, "before it wrote down the third failure")
    dead = stage.see(job_id)
    show("Now", dead)
    say(stage.broker.redelivery)
    stage.broker.redeliver(job_id, stage.patience)
    say("And when the dead worker's lease ends, the job has no attempt left.")
    stage.start_worker()
    end = stage.until(
        "the quarantine",
        job_id,
        lambda s: s.state == "quarantined" and s.quarantined > before and s.at_rest,
    )
    show("At the end", end)
    return judge(before, dead, end)


def judge(before: int, dead: Seen, end: Seen) -> Verdict:
    """What must hold after the death, and at the end.

    Arguments:
        before: messages in the quarantine queue before it all.
    """
    return weigh(
        TITLE,
        "three attempts and no fourth; in quarantine, with the reason",
        {
            "the third attempt was running at the death": dead.state == "running"
            and dead.attempt == 3,
            "the job is in quarantine": end.state == "quarantined",
            "the reason is lost_worker": end.reason == "lost_worker",
            "it took three attempts": end.attempt == 3 and end.journal.count("claimed") == 3,
            "the body ran three times": end.runs == 3,
            "the journal says so, once": end.journal.count("quarantined") == 1,
            "a copy lies in the quarantine queue": end.quarantined > before,
            "nothing goes round in the queue": end.waiting == 0,
            "there is no file": end.files == (),
        },
    )
