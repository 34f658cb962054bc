"""Failure 2: the dispatcher dies after it has published, before it marks the outbox row."""

from __future__ import annotations

from example_project.faults import Fault
from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 8
TITLE = "2. after publish, before the mark"


def fault(marker: str) -> Fault:
    """Where the dispatcher dies."""
    return Fault("dispatch.before_mark", job_of(ACCOUNT), marker)


def play(stage: Stage) -> Verdict:
    """Let the message be published twice while no worker looks, then start one."""
    heading("2. The dispatcher is killed after it has published, before it marks that")
    say("The worker is stopped first, so that the messages can be counted.")
    stage.stop_worker()
    job_id = job_of(ACCOUNT)
    stage.request(ACCOUNT)
    stage.wait_for_death(stage.dispatcher, "after the broker has confirmed the message")
    dead = stage.until("the message in the queue", job_id, lambda seen: seen.waiting >= 1)
    show("Now", dead)
    say("Nobody knows that it was published: the next dispatcher publishes it again.")
    stage.start_dispatcher()
    twice = stage.until(
        "the second message", job_id, lambda s: s.waiting >= 2 and s.published_at is not None
    )
    show("Now", twice)
    stage.start_worker()
    end = stage.until("both deliveries", job_id, lambda s: s.deliveries >= 2 and s.at_rest)
    show("At the end", end)
    return judge(dead, twice, end)


def judge(dead: Seen, twice: Seen, end: Seen) -> Verdict:
    """What must hold after the death, after the second message, and at the end."""
    return weigh(
        TITLE,
        "published twice, delivered twice, run once",
        {
            "the message was published but not marked": dead.waiting == 1
            and dead.published_at is None,
            "the outbox row was still there": dead.outbox_rows == 1,
            "it was published twice": twice.waiting == 2 and twice.published_at is not None,
            "both messages were delivered": end.deliveries == 2,
            "the second one was seen to be a duplicate": end.journal.count("duplicate") == 1,
            "the job succeeded": end.state == "succeeded",
            "the body ran once": end.runs == 1 and end.journal.count("claimed") == 1,
            "there is one file": end.files == (end.file,),
            "the queue is empty": end.waiting == 0,
        },
    )
