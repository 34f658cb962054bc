"""What Celery's beat does with a call that is recorded: it gets a result, and goes on."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
from celery.beat import Scheduler

from celery_outbox.core.states import State
from tests.factories import Database, add_task, open_outbox


@pytest.mark.parametrize("name", ["shop.export", "billing.invoice"])
def test_each_tick_of_beat_records_one_job_whose_id_it_tells(
    installed_url: str, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.DEBUG, "celery.beat")
    entry: dict[str, Any] = {"task": name, "schedule": timedelta(0), "args": (1,)}
    settings = {"broker_url": "memory://", "beat_schedule": {"nightly": entry}}
    with open_outbox(installed_url, init=False, **settings) as outbox:
        recorded = Database(outbox.engine, outbox.tables)
        add_task(outbox.app, name="shop.export")
        scheduler = Scheduler(outbox.app)
        ticks = [scheduler.tick() for _ in range(3)]
        jobs = {each.job_id: recorded.job(each.job_id) for each in recorded.messages()}
    assert len(ticks) == 3
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
    told = [line.message for line in caplog.records if "sent. id->" in line.message]
    assert told == [f"{name} sent. id->{job_id}" for job_id in jobs]
    relayed = name != "shop.export"
    found = [(job.state, job.task, job.relay) for job in jobs.values()]
    assert found == [(State.QUEUED, name, relayed)] * len(ticks)
