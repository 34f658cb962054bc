"""Failure 4, first variant: the process that runs the job dies in each of the three attempts."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 11
TITLE = "4a. killed in the third attempt"


def fault() -> Fault:
    """Where the worker's pool process dies, each time."""
    return Fault("execute.after_claim", job_of(ACCOUNT))


def play(stage: Stage) -> Verdict:
    """Kill the pool process at every attempt."""
    heading("4a. The process that runs the job is killed in each of three attempts")
    say("The worker now has a pool: its child process dies, as if out of memory.")
    job_id = job_of(ACCOUNT)
    before = stage.broker.quarantined()
    stage.request(ACCOUNT)
    end = stage.until(
        "the quarantine",
        job_id,
        lambda s: s.state == "quarantined" and s.waiting == 0 and s.quarantined > before,
    )
    show("At the end", end)
    return judge(before, end, worker_lives=not stage.worker.ended)


def judge(before: int, end: Seen, *, worker_lives: bool) -> Verdict:
    """What must hold at the end."""
    return weigh(
        TITLE,
        "three attempts, then quarantine with its reason; the worker lives",
        {
            "the job is in quarantine": end.state == "quarantined",
            "the reason is lost_worker": end.reason == "lost_worker",
            "it took three attempts": end.attempt == 3 and end.journal.count("claimed") == 3,
            "the journal ends with that": "quarantined" in end.journal[-2:],
            "a copy lies in the quarantine queue": end.quarantined == before + 1,
            "nothing goes round in the queue": end.waiting == 0,
            "there is no file": end.files == (),
            "the worker lives": worker_lives,
        },
    )
