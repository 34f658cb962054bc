"""The database rolls a transaction back, in a statement or at the commit: it is tried again."""

from __future__ import annotations

from sqlalchemy import text

from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.system import System
from tests.wait import eventually

#: Raises a deadlock and, at the commit, a serialization failure in turn, the first times that the
#: journal gets a line of a kind; every transition writes one. A sequence keeps its value through a
#: rollback.
INJECTION = """
CREATE FUNCTION deadlock() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    seen bigint := nextval('seen_' || NEW.event);
BEGIN
    IF seen <= {times} AND seen % 2 = 1 THEN
        RAISE EXCEPTION 'injected' USING ERRCODE = '40P01';
    END IF;
    RETURN NEW;
END $$;
CREATE FUNCTION not_serializable() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    seen bigint := currval('seen_' || NEW.event);
BEGIN
    IF seen <= {times} AND seen % 2 = 0 THEN
        RAISE EXCEPTION 'injected' USING ERRCODE = '40001';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER deadlock BEFORE INSERT ON outbox_event
    FOR EACH ROW EXECUTE FUNCTION deadlock();
CREATE CONSTRAINT TRIGGER not_serializable AFTER INSERT ON outbox_event
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION not_serializable();
"""

EVENTS = ("recorded", "published", "claimed", "retrying", "succeeded", "quarantined", "rescued")


@on_rabbitmq
def test_deadlocks_and_serialization_failures_are_tried_again_wherever_they_come(
    system: System,
) -> None:
    with system.outbox.engine.begin() as connection:
        for event in (*EVENTS, "copied", "duplicate", "deferred", "stale", "expired"):
            connection.execute(text(f"CREATE SEQUENCE seen_{event}"))
        # One more than a transaction is tried: whoever called it has to go on, too.
        connection.execute(text(INJECTION.format(times=6)))
        # A caller without a transaction has nobody to go on for it.
        connection.execute(text("SELECT setval('seen_recorded', 3)"))
    system.shop.add.apply_async((1, 2), task_id="add-1")
    system.shop.fail.apply_async(("away",), task_id="fail-1")
    system.shop.insist.apply_async(task_id="insist-1")
    system.shop.refuse.apply_async(("no",), task_id="refuse-1")
    dispatcher = system.dispatcher()
    worker = system.worker("-c", "2", pool="threads")

    assert system.reaches("add-1", "succeeded", deadline=60).attempt == 1
    assert system.reaches("insist-1", "succeeded", deadline=60).attempt == 6
    assert system.reaches("refuse-1", "quarantined", deadline=60).attempt == 1
    assert system.reaches("fail-1", "quarantined", deadline=60).attempt == 3
    runs = [system.runs(name) for name in ("add-1", "insist-1", "refuse-1", "fail-1")]
    assert runs == [1, 6, 1, 3]

    # Maintenance takes back what a killed worker held.
    system.shop.wait_for.apply_async(("go",), task_id="slow")
    system.reaches("slow", "running")
    worker.kill()
    system.worker("-c", "2", pool="threads")
    (system.folder / "go").touch()
    assert system.reaches("slow", "succeeded", deadline=60).attempt == 2

    eventually(lambda: system.depth("celery") == 0)
    with system.outbox.engine.connect() as connection:
        for event in EVENTS:
            seen = connection.execute(text(f"SELECT last_value FROM seen_{event}")).scalar_one()
            assert seen > 6, f"{event} was never written after its failures"
        running = "SELECT count(*) FROM outbox_job WHERE state = 'running'"
        assert connection.execute(text(running)).scalar_one() == 0
    assert dispatcher.alive
