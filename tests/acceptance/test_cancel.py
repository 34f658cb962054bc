"""A job that was revoked while no worker was there is never run by one."""

from __future__ import annotations

import pytest
from sqlalchemy.orm import Session

from tests.acceptance.system import System
from tests.wait import eventually


@pytest.mark.parametrize("system", ["postgresql-rabbitmq", "postgresql-redis"], indirect=True)
def test_what_is_revoked_or_cancelled_while_no_worker_is_up_never_runs(system: System) -> None:
    add, control = system.shop.add, system.shop.app.control
    for name in ("published-1", "published-2", "rolled-back"):
        add.apply_async((1, 2), task_id=name)
    assert system.dispatcher("--once").wait() == 0
    assert system.depth("celery") == 3
    add.apply_async((1, 2), task_id="recorded")
    delayed = add.apply_async((1, 2), task_id="delayed", countdown=0.5)

    control.revoke(["published-1", "recorded"])
    delayed.revoke()
    with Session(system.outbox.engine) as session:
        system.outbox.cancel("published-2", session=session)
        session.commit()
        system.outbox.cancel("rolled-back", session=session)
        session.rollback()
    revoked = ("published-1", "published-2", "recorded", "delayed")
    assert {system.job(name).state for name in revoked} == {"cancelled"}
    system.dispatcher()
    system.worker()

    add.apply_async((1, 2), task_id="last")
    for name in ("rolled-back", "last"):
        system.reaches(name, "succeeded")
    eventually(lambda: system.depth("celery") == 0)
    for name in revoked:
        assert (system.job(name).state, system.runs(name)) == ("cancelled", 0)
    eventually(lambda: system.job("published-2").deliveries == 1)
