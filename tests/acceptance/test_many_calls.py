"""Thousands of calls in one transaction of a process that dies right after its commit."""

from __future__ import annotations

import signal
import sys

import pytest
from sqlalchemy import func, select

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually

pytestmark = [pytest.mark.once, pytest.mark.slow, pytest.mark.timeout(600)]

#: With 10,000 the test says the same and takes minutes; that many are recorded in
#: tests/integration/test_buffered.py.
JOBS = 2_000

CALLER = f"""
import os
from sqlalchemy import event
from sqlalchemy.orm import Session
from tests.acceptance.app import add, outbox

with Session(outbox.engine) as session, outbox.use(session):
    sent = []
    event.listen(
        outbox.engine, "before_cursor_execute", lambda c, cursor, text, *rest: sent.append(text)
    )
    for number in range({JOBS}):
        add.delay(number, 0)
    session.commit()
    print(len([text for text in sent if "INSERT" in text]), flush=True)
    os._exit(1)
"""


@on_rabbitmq
def test_all_of_them_run_though_the_dispatcher_is_killed_in_the_drain(
    system: System, processes
) -> None:
    caller = processes.start([sys.executable, "-c", CALLER], env=system.environment, name="caller")
    assert caller.wait(120) == 1
    # One for each 500 of them.
    assert caller.log().strip() == "4"
    assert system.depth("celery") == 0

    dying = system.dispatcher(fault="dispatch.before_mark")
    assert dying.wait(60) == -signal.SIGKILL
    assert 0 < system.depth("celery") < JOBS
    system.dispatcher()
    system.worker("-c", "4", pool="threads")

    job = system.outbox.tables.job

    def finished() -> dict[str, int]:
        statement = select(job.c.state, func.count()).group_by(job.c.state)
        with system.outbox.engine.connect() as connection:
            return {state: number for state, number in connection.execute(statement)}

    eventually(lambda: finished() == {"succeeded": JOBS}, deadline=240, interval=0.5)
    with system.outbox.engine.connect() as connection:
        results = [int(result) for result in connection.scalars(select(job.c.result))]
    assert sorted(results) == list(range(JOBS))
    assert len((system.folder / "runs").read_text().splitlines()) == JOBS
