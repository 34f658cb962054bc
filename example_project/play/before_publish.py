"""Failure 1: the dispatcher dies after it has claimed the outbox row, before it publishes it."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 7
TITLE = "1. before publish"


def fault(marker: str) -> Fault:
    """Where the dispatcher dies."""
    return Fault("dispatch.before_publish", job_of(ACCOUNT), marker)


def play(stage: Stage) -> Verdict:
    """Kill the dispatcher with the message in its hands, and start another one."""
    heading("1. The dispatcher is killed before it publishes")
    job_id = job_of(ACCOUNT)
    stage.request(ACCOUNT)
    stage.wait_for_death(stage.dispatcher, "after it claimed the outbox row")
    dead = stage.see(job_id)
    show("Now", dead)
    say("The row is free again when the dead dispatcher's claim ends.")
    stage.start_dispatcher()
    end = stage.until("the job to succeed", job_id, lambda s: s.state == "succeeded" and s.at_rest)
    show("At the end", end)
    return judge(dead, end)


def judge(dead: Seen, end: Seen) -> Verdict:
    """What must hold after the death, and at the end."""
    return weigh(
        TITLE,
        "the outbox row outlived the dispatcher; published by the next one, run once",
        {
            "nothing was published at the death": dead.published_at is None and dead.waiting == 0,
            "the outbox row was still there": dead.state == "queued" and dead.outbox_rows == 1,
            "no file was there": dead.files == (),
            "the job succeeded": end.state == "succeeded",
            "its message was published": end.published_at is not None,
            "it was published once": end.journal.count("published") == 1 and end.deliveries == 1,
            "the body ran once": end.runs == 1,
            "there is one file": end.files == (end.file,),
            "the queue is empty": end.waiting == 0,
        },
    )
