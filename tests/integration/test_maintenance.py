"""Maintenance is done by one at a time, and taken over from one that falls silent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import text, update
from sqlalchemy.exc import OperationalError

from celery_outbox import RetryPolicy
from celery_outbox.core.states import State
from celery_outbox.operate import maintenance as maintaining
from celery_outbox.operate.maintenance import Maintained, Maintenance
from celery_outbox.store import job as jobs
from celery_outbox.store import locks
from celery_outbox.store.clock import db_after
from celery_outbox.store.database import Database as Store
from tests.factories import Database
from tests.wait import eventually


@pytest.fixture
def make(database: Database) -> Callable[..., Maintenance]:
    """Returns another one that may do the maintenance of the same tables."""
    store = Store(database.tables, lambda: database.engine, os.getpid(), patience=60)

    def make(**options: Any) -> Maintenance:
        defaults = {
            "policy_of": lambda task: RetryPolicy(3, delay=0),
            "queue_depth": lambda queue: 0,
            "republish_after": 600.0,
            "lease": 60.0,
        }
        return Maintenance(store, **{**defaults, **options})

    return make


def lapse(database: Database) -> None:
    """Let the holder's time be over."""
    lock = database.tables.lock
    database.execute(update(lock).values(held_until=db_after(-1)))


def token(database: Database) -> int:
    lock = database.tables.lock
    with database.engine.connect() as connection:
        return int(connection.execute(lock.select()).one().token)


def put_lost_job(database: Database, job_id: str) -> None:
    database.put(State.RUNNING, job_id=job_id)
    database.end_lease(job_id)


def test_while_one_does_it_another_does_nothing_and_says_who_does(database, make):
    first, second = make(), make()
    assert first.run(keep=True) == Maintained()
    put_lost_job(database, "job-1")
    assert second.run() == Maintained(left_to=first._actor)
    assert database.job("job-1").state == "running"
    assert first.run(keep=True).rescued == 1


def test_a_single_run_leaves_it_to_the_next(database, make):
    assert make().run() == Maintained()
    assert make().run() == Maintained()


def test_one_that_gives_up_is_followed_at_once(database, make):
    first, second = make(), make()
    first.run(keep=True)
    first.release()
    assert second.run(keep=True).left_to is None
    assert first.run().left_to == second._actor


def test_one_that_falls_silent_is_taken_over_and_cannot_go_on(database, make):
    first, second = make(), make()
    first.run(keep=True)
    lapse(database)
    put_lost_job(database, "job-1")
    assert second.run(keep=True).rescued == 1
    first.release()
    assert first.run().left_to == second._actor
    assert second.run(keep=True).left_to is None


def test_one_that_is_overtaken_in_the_middle_of_a_run_stops(database, make, monkeypatch):
    monkeypatch.setattr(maintaining, "BATCH", 1)
    first, second = make(), make()
    for number in range(3):
        put_lost_job(database, f"job-{number}")
    rescue = Maintenance._rescue

    def rescue_and_fall_silent(self: Maintenance, connection: Any) -> Any:
        if self is first and locks.holder_of(connection, database.tables, "maintenance"):
            done = rescue(self, connection)
            later = lock.update().values(held_by=second._actor)
            connection.execute(later)
            return done
        return rescue(self, connection)

    lock = database.tables.lock
    monkeypatch.setattr(Maintenance, "_rescue", rescue_and_fall_silent)
    assert first.run() == Maintained(rescued=1, left_to=second._actor)
    assert second.run().rescued == 2


def test_the_token_grows_with_each_holder_and_not_with_each_run(database, make):
    first, second = make(), make()
    first.run(keep=True)
    first.run(keep=True)
    assert token(database) == 1
    lapse(database)
    second.run(keep=True)
    assert token(database) == 2
    # Its own, after it was silent: somebody else may have held it in between.
    lapse(database)
    second.run(keep=True)
    assert token(database) == 3


def test_a_lock_is_not_released_by_one_that_does_not_hold_it(database):
    assert database.do(locks.hold, "door", holder="a", ttl=60)
    assert not database.do(locks.hold, "door", holder="b", ttl=60)
    assert not database.do(locks.release, "door", holder="b")
    assert database.do(locks.holder_of, "door") == "a"
    assert database.do(locks.release, "door", holder="a")
    assert database.do(locks.holder_of, "door") is None
    assert database.do(locks.hold, "door", holder="b", ttl=60)


@pytest.mark.parametrize("installed_url", ["postgresql", "mariadb"], indirect=True)
def test_nobody_waits_for_one_that_is_frozen_while_it_takes_the_lock(database, make):
    database.do(locks.hold, locks.MAINTENANCE, holder="gone", ttl=60)
    lapse(database)
    put_lost_job(database, "job-1")
    with database.engine.connect() as frozen, frozen.begin() as transaction:
        assert locks.hold(frozen, database.tables, locks.MAINTENANCE, holder="frozen", ttl=60)
        with database.engine.begin() as connection:
            # Whoever waits fails.
            database.wait_for_locks(connection, 1)
            name = locks.MAINTENANCE
            assert not locks.hold(connection, database.tables, name, holder="other", ttl=60)
            assert not locks.release(connection, database.tables, name, holder="gone")
        transaction.rollback()
    assert make().run().rescued == 1


@pytest.mark.parametrize("installed_url", ["postgresql"], indirect=True)
def test_what_a_frozen_holder_has_locked_is_free_after_its_time(database, make):
    put_lost_job(database, "job-1")
    database.do(locks.hold, locks.MAINTENANCE, holder="frozen", ttl=0.5)
    with database.engine.connect() as frozen:
        assert locks.hold(frozen, database.tables, locks.MAINTENANCE, holder="frozen", ttl=0.5)
        assert [job.id for job in jobs.lock_expired(frozen, database.tables, 10)] == ["job-1"]
        other = make()
        eventually(lambda: other.run().rescued == 1)
        with pytest.raises(OperationalError):
            frozen.execute(text("SELECT 1"))
    with database.engine.connect() as connection:
        # Of the transactions of the maintenance alone.
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == "0"
