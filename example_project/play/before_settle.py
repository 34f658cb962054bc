"""Failure 3, second variant: the worker dies with the file written and the state not."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 10
TITLE = "3b. after the file, before the state and the ack"


def fault(marker: str) -> Fault:
    """Where the worker dies."""
    return Fault("execute.before_settle", job_of(ACCOUNT), marker)


def play(stage: Stage) -> Verdict:
    """Kill the worker between the file and the state, and start another one."""
    heading("3b. The worker is killed after it has written the file, before the state")
    job_id = job_of(ACCOUNT)
    stage.request(ACCOUNT)
    stage.wait_for_death(stage.worker, "after it wrote the file")
    dead = stage.see(job_id)
    show("Now", dead)
    say(stage.broker.redelivery)
    stage.broker.redeliver(job_id, stage.patience)
    say("And when the dead worker's lease ends, the dispatcher takes the job back.")
    stage.start_worker()
    end = stage.until("the second attempt", job_id, lambda s: s.state == "succeeded" and s.at_rest)
    show("At the end", end)
    return judge(dead, end)


def judge(dead: Seen, end: Seen) -> Verdict:
    """What must hold after the death, and at the end."""
    return weigh(
        TITLE,
        "the second attempt found the file and took it; not run again, no second file",
        {
            "the job was running at the death": dead.state == "running",
            "the file was there at the death": dead.files == (dead.file,),
            "the job succeeded": end.state == "succeeded",
            "it took a second attempt": end.attempt == 2 and end.deliveries >= 2,
            "the body ran once": end.runs == 1,
            "there is one file": end.files == (end.file,),
            "the file is the first one": end.stamp is not None and end.stamp == dead.stamp,
            "the queue is empty": end.waiting == 0,
        },
    )
