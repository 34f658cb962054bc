"""Failure 3, first variant: the worker dies after it has stored the result, before the ack."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 9
TITLE = "3a. after the result and the state, before the ack"


def fault(marker: str) -> Fault:
    """Where the worker dies."""
    return Fault("execute.after_settle", job_of(ACCOUNT), marker)


def play(stage: Stage) -> Verdict:
    """Kill the worker with everything done but the ack, and start another one."""
    heading("3a. The worker is killed after the job has succeeded, before the ack")
    job_id = job_of(ACCOUNT)
    stage.request(ACCOUNT)
    stage.wait_for_death(stage.worker, "after it wrote the file and the state")
    dead = stage.see(job_id)
    show("Now", dead)
    say(stage.broker.redelivery)
    stage.broker.redeliver(job_id, stage.patience)
    stage.start_worker()
    end = stage.until(
        "the redelivery", job_id, lambda s: s.deliveries > dead.deliveries and s.at_rest
    )
    show("At the end", end)
    return judge(dead, end)


def judge(dead: Seen, end: Seen) -> Verdict:
    """What must hold after the death, and at the end."""
    return weigh(
        TITLE,
        "delivered again, the stored result was found, not run again, no second file",
        {
            "the job had succeeded at the death": dead.state == "succeeded",
            "the file was there at the death": dead.files == (dead.file,),
            "the message was delivered again": end.deliveries > dead.deliveries >= 1,
            "it was seen to be a duplicate": "duplicate" in end.journal,
            "the job is still succeeded": end.state == "succeeded",
            "it took one attempt": end.attempt == 1,
            "the body ran once": end.runs == 1,
            "there is one file": end.files == (end.file,),
            "the file is the first one": end.stamp is not None and end.stamp == dead.stamp,
            "the queue is empty": end.waiting == 0,
        },
    )
