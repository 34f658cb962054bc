"""An export to which nothing happens."""

from __future__ import annotations

from typing import Any

from example_project.play.look import Seen
from example_project.play.report import heading, say, show
from example_project.play.stage import Stage, job_of
from example_project.play.verdict import Verdict
from example_project.play.verdict import judge as weigh

ACCOUNT = 42
TITLE = "0. nothing fails"


def play(stage: Stage) -> Verdict:
    """Ask for an export over HTTP, wait for it, ask again."""
    heading("0. An export over HTTP")
    stage.start_web()
    stage.start_dispatcher()
    stage.start_worker()
    job_id = job_of(ACCOUNT)
    first = stage.request(ACCOUNT)
    path = f"/jobs/{job_id}"

    def finished() -> dict[str, Any] | None:
        job = stage.client.get(path)[1]
        return job if job.get("finished_at") else None

    job = stage.patience.until("the first export", finished)
    say(f"GET {path}")
    say(f"  -> state {job['state']}, result {job['result_key']}")
    lines = (stage.settings.folder / job["result_key"]).read_text().splitlines()
    for line in lines[:4]:
        say(f"     {line}")
    say(f"     ... {len(lines)} lines")
    say("The same request again finds the same job:")
    second = stage.request(ACCOUNT)
    end = stage.until("the mark", job_id, lambda seen: seen.at_rest)
    show("At the end", end)
    return judge(first, second, end)


def judge(
    first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]], end: Seen
) -> Verdict:
    """What must hold, whatever happens."""
    return weigh(
        TITLE,
        "accepted with 202, run once, one file; a second request found the first job",
        {
            "the request was accepted": first[0] == 202 and first[1].get("new") is True,
            "the second request found the first job": second[0] == 202
            and second[1].get("new") is False
            and second[1].get("job_id") == first[1].get("job_id") == end.job_id,
            "the job succeeded": end.state == "succeeded",
            "the job was recorded once": end.journal.count("recorded") == 1,
            "its message was published": end.published_at is not None,
            "the body ran once": end.runs == 1,
            "there is one file": end.files == (end.file,),
            "the queue is empty": end.waiting == 0,
        },
    )
