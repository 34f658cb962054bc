"""Sets the stage, plays all parts in order, and counts the verdicts."""

from __future__ import annotations

import os
import time

from example_project import faults
from example_project.configuration import make_celery
from example_project.play import (
    after_settle,
    before_mark,
    before_publish,
    before_settle,
    third_attempt,
    third_error,
    undisturbed,
)
from example_project.play.look import look
from example_project.play.patience import Patience, TimedOut
from example_project.play.processes import Processes
from example_project.play.report import heading, say
from example_project.play.stage import Stage
from example_project.play.verdict import Verdict
from example_project.prepare import check_broker_url, prepare_broker, prepare_database
from example_project.settings import Settings

#: In the order in which they are played.
PARTS = (
    undisturbed,
    before_publish,
    before_mark,
    after_settle,
    before_settle,
    third_attempt,
    third_error,
)
#: Seconds for everything but the clearing up; a machine that has much else to do may need more.
LIMIT = float(os.environ.get("EXAMPLE_LIMIT", "55"))


def demonstrate(settings: Settings) -> bool:
    """Play everything; returns whether every verdict is right.

    Raises:
        Unusable: the database or the broker cannot be used.
    """
    started = time.monotonic()
    patience = Patience(LIMIT)
    check_broker_url(settings.broker_url)
    app, outbox = make_celery(settings)
    engine = prepare_database(settings, outbox)
    broker = prepare_broker(settings, app, outbox)
    marker = settings.folder / "killed"
    logs = settings.folder / "logs"
    for folder in (marker, logs):
        folder.mkdir()
    deaths = [
        before_publish.fault(str(marker / "dispatcher-1")),
        before_mark.fault(str(marker / "dispatcher-2")),
        after_settle.fault(str(marker / "worker-1")),
        before_settle.fault(str(marker / "worker-2")),
        third_attempt.fault(str(marker / "worker-3")),
    ]
    environment = {**settings.as_environment(), **faults.as_environment(deaths)}
    with Processes(logs, environment) as processes:
        see = look(outbox, engine, broker, settings.folder)
        verdicts = _play(Stage(settings, engine, broker, processes, patience, see))
    engine.dispose()
    outbox.engine.dispose()
    heading("Verdicts")
    for verdict in verdicts:
        print(verdict, flush=True)
    right = len(verdicts) == len(PARTS) and all(verdict.ok for verdict in verdicts)
    print(
        f"\n{'All is well' if right else 'Something is wrong'}, {time.monotonic() - started:.0f} s"
    )
    return right


def _play(stage: Stage) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for part in PARTS:
        try:
            verdicts.append(part.play(stage))
        except TimedOut as error:
            # What follows needs what this part would have left behind.
            verdicts.append(Verdict(part.TITLE, "", (f"everything ends in time ({error})",)))
            for process in stage.processes.started[-4:]:
                say(f"the last words of {process.log.name}:")
                for line in process.last_words():
                    say(f"  {line}")
        print(f"\n{verdicts[-1]}", flush=True)
        if not verdicts[-1].finding:
            break
    return verdicts
