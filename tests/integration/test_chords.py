"""Chords are counted in the database: each member once, and the body once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Task, _state, chain, chord, group
from celery.app.task import Context
from celery.exceptions import TaskRevokedError
from sqlalchemy import Connection, event, select
from sqlalchemy.orm import Session

from celery_outbox import NoTransaction, Outbox, PayloadTooLarge, PermanentError
from celery_outbox.core.chords import Part
from celery_outbox.core.reasons import Reason
from celery_outbox.execute.chords import Chords
from celery_outbox.operate import members
from celery_outbox.store import chords, quarantining, transitions
from celery_outbox.store import job as jobs
from celery_outbox.store.schema import Tables
from tests.factories import Database, open_outbox
from tests.integration.delivering import add_task, again, deliver, raising
from tests.integration.shop import Shop


@pytest.fixture
def shop(outbox: Outbox, recorded: Database) -> Shop:
    return Shop(outbox, recorded)


def test_the_body_gets_the_results_in_the_order_of_the_header(shop):
    chord(shop.part.s(number) for number in range(5))(shop.body.s())
    assert shop.chords() == [("open", 5, 0)]
    shop.run(shop.part)
    assert shop.chords() == [("done", 5, 5)]
    assert (shop.waiting("shop.body"), shop.parts()) != ([], 5)
    shop.run()
    assert shop.calls == [[0, 1, 2, 3, 4]]
    assert shop.parts() == 0


def test_a_body_is_recorded_when_the_last_member_has_ended_and_not_before(shop):
    chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
    first, second = shop.waiting("shop.part")
    deliver(shop.part, first)
    assert shop.waiting("shop.body") == []
    deliver(shop.part, second)
    assert len(shop.waiting("shop.body")) == 1


def test_a_duplicate_delivery_counts_no_member_twice_and_runs_no_body_twice(shop):
    chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
    first, second = shop.waiting("shop.part")
    for _ in range(3):
        deliver(shop.part, first)
        again(shop.part, first)
    assert shop.chords() == [("open", 2, 1)]
    for _ in range(3):
        again(shop.part, second)
    [body] = shop.waiting("shop.body")
    deliver(shop.body, body)
    again(shop.part, first)
    again(shop.body, body)
    assert len(shop.calls) == 1
    assert shop.chords() == [("done", 2, 2)]
    assert shop.parts() == 0


def test_a_worker_that_dies_between_settle_and_count_loses_nothing(shop, monkeypatch):
    chord([shop.part.s(1)])(shop.body.s())
    [job_id] = shop.waiting("shop.part")
    with monkeypatch.context() as dying:
        dying.setattr(Chords, "part_returned", lambda *args: True)
        deliver(shop.part, job_id)
    assert shop.recorded.job(job_id).state == "succeeded"
    assert shop.waiting("shop.body") == []
    again(shop.part, job_id)
    shop.run()
    assert shop.calls == [[1]]


def test_maintenance_counts_what_a_worker_settled_and_never_counted(shop, monkeypatch):
    chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
    with monkeypatch.context() as dying:
        dying.setattr(Chords, "part_returned", lambda *args: True)
        shop.run(shop.part)
    assert shop.members.count() == 2
    assert shop.members.count() == 0
    shop.run()
    assert shop.calls == [[1, 2]]


def test_two_last_members_at_once_record_one_body(shop):
    chord([shop.part.s(number) for number in range(4)])(shop.body.s())
    together = threading.Barrier(4)

    def end(job_id: str) -> None:
        together.wait(30)
        deliver(shop.part, job_id)

    shop.part.__trace__  # noqa: B018 (made before the threads, which share it)
    threads = [threading.Thread(target=end, args=(each,)) for each in shop.waiting("shop.part")]
    deliver(shop.errback, shop.errback.delay("warm").id)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert shop.chords() == [("done", 4, 4)]
    shop.run()
    assert shop.calls == [[0, 1, 2, 3]]


def test_a_header_in_quarantine_ends_the_chord_in_an_error(shop):
    body = shop.body.s().on_error(shop.errback.s())
    result = chord([shop.part.s(1), shop.refuse.s(), shop.part.s(3)])(body)
    shop.run(shop.refuse)
    assert shop.chords() == [("open", 3, 1)]
    shop.run(shop.part)
    state, text = shop.reaches(result.id)
    assert state == "FAILURE"
    assert text.startswith("Dependency ")
    assert text.endswith(" raised PermanentError('no')")
    assert shop.chords() == [("failed", 3, 3)]
    [called] = shop.waiting("shop.errback")
    for _ in range(2):
        again(shop.refuse, quarantined(shop))
    assert shop.waiting("shop.errback") == [called]
    assert shop.calls == []


def quarantined(shop: Shop) -> str:
    """Return the id of the one job in quarantine."""
    [entry] = shop.outbox.control.quarantined()
    return entry.id


def test_a_replayed_header_that_succeeds_runs_the_body_after_all(shop):
    twice = add_task(shop.outbox.app, raising(PermanentError("once")), name="shop.twice")
    chord([shop.part.s(1), twice.si()])(shop.body.s())
    shop.run(twice, shop.part)
    assert shop.chords() == [("failed", 2, 2)]
    job_id = quarantined(shop)
    shop.outbox.control.replay(job_id)
    deliver(twice, job_id)
    shop.run()
    assert shop.calls == [[1, "done"]]
    assert shop.chords() == [("done", 2, 2)]


def park(shop: Shop, job_id: str) -> None:
    why: dict[str, Any] = {"reason": Reason.UNROUTABLE, "copy": False}
    shop.recorded.do(quarantining.quarantine_waiting, job_id, attempt=0, actor="d", **why)


def cancel(shop: Shop, job_id: str) -> None:
    shop.outbox.control.cancel(job_id)


def expire(shop: Shop, job_id: str) -> None:
    shop.recorded.do(transitions.expire, job_id, attempt=0, actor="m")


ENDINGS: list[Callable[[Shop, str], None]] = [park, cancel, expire]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("place", ["member", "first step", "chord inside"])
def test_a_member_that_ends_without_a_worker_ends_the_chord(shop, ending, place):
    waits = shop.refuse.s()
    headers = {
        "member": [shop.part.s(1), waits],
        "first step": [shop.part.s(1), chain(waits, shop.part.s())],
        "chord inside": [shop.part.s(1), chord([waits, shop.part.s(2)], shop.body.s())],
    }
    body = shop.body.s().on_error(shop.errback.s())
    result = chord(headers[place])(body)
    shop.run(shop.part)
    [job_id] = shop.waiting("shop.refuse")
    ending(shop, job_id)
    assert shop.members.count() == 1
    state, text = shop.reaches(result.id)
    assert state == "FAILURE"
    assert "ChordError" in text or "TaskRevokedError" in text or "unroutable" in text
    assert {state for state, _, _ in shop.chords()} == {"failed"}
    assert len(shop.waiting("shop.errback")) == 1
    assert shop.members.count() == 0
    assert shop.calls == []


def test_a_part_of_a_task_without_the_outbox_is_counted_with_its_result(shop):
    bare = add_task(shop.outbox.app, lambda value: value, name="shop.bare", base=Task)
    header = chord([shop.part.s(1)])
    result = header(shop.body.s())
    chord_id = result.parent.id
    backend = shop.outbox.app.backend
    backend.set_chord_size(chord_id, 2)
    shop.run(shop.part)
    request = Context(
        id="bare-1", group=chord_id, group_index=1, chord=shop.body.s().set(task_id=result.id)
    )
    backend.mark_as_done("bare-1", bare.run(7), request)
    backend.mark_as_done("bare-1", bare.run(7), request)
    shop.run()
    assert shop.calls == [[1, 7]]


def test_one_job_in_two_places_of_a_header_runs_once_and_counts_for_both(shop):
    same = shop.part.s(5).set(task_id="part-5")
    chord([same, shop.part.s(1), same])(shop.body.s())
    assert len(shop.waiting("shop.part")) == 2
    shop.run()
    assert shop.chords() == [("done", 3, 3)]
    shop.run()
    assert shop.calls == [[5, 1, 5]]


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_that_was_asked_for_before_counts_for_a_second_chord(shop, ended):
    first = shop.part.s(5).set(task_id="part-5")
    chord([first])(shop.body.s())
    if ended:
        shop.run(shop.part)
    chord([first, shop.part.s(1)])(shop.body.s())
    shop.run(shop.part)
    shop.members.count()
    shop.run()
    assert sorted(shop.calls) == [[5], [5, 1]]


def test_a_member_that_adds_another_one_makes_the_body_wait_for_it(shop):
    app = shop.outbox.app

    def grow(self: Any) -> int:
        self.add_to_chord(shop.part.s(2))
        return 1

    task = add_task(app, grow, name="shop.grow", bind=True)
    chord([task.s(), shop.part.s(3)])(shop.body.s())
    [added_by] = shop.waiting("shop.grow")
    deliver(task, added_by)
    assert len(shop.waiting("shop.part")) == 2
    shop.run()
    assert [sorted(values) for values in shop.calls] == [[1, 2, 3]]


def test_a_body_that_cannot_be_called_fails_the_chord_as_in_celery(shop):
    narrow = add_task(shop.outbox.app, raising(), name="shop.narrow")
    narrow.__header__ = lambda: None
    result = chord([shop.part.s(1)])(narrow.s())
    shop.run(shop.part)
    state, text = shop.reaches(result.id)
    assert state == "FAILURE"
    assert text.startswith("Callback error: TypeError(")
    assert shop.chords() == [("failed", 1, 1)]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_chord_shares_the_fate_of_the_callers_transaction(shop, end):
    with Session(shop.outbox.engine) as session:
        with shop.outbox.use(session):
            chord([shop.part.s(1), shop.part.s(2)], shop.body.s()).delay()
        getattr(session, end)()
    committed = end == "commit"
    assert shop.recorded.counts()[0] == (2 if committed else 0)
    assert shop.chords() == ([("open", 2, 0)] if committed else [])
    shop.run()
    shop.run()
    assert shop.calls == ([[1, 2]] if committed else [])


def test_a_group_or_chain_takes_the_session_of_its_call_and_a_chord_refuses_it(shop):
    with Session(shop.outbox.engine) as session:
        group(shop.part.s(1), shop.part.s(2)).apply_async(session=session)
        chain(shop.part.s(1), shop.part.s()).apply_async(session=session)
        with pytest.raises(TypeError):
            # Celery copies the options of a chord for its body.
            chord([shop.part.s(1)], shop.body.s()).apply_async(session=session)
        assert shop.recorded.counts()[0] == 0
        session.commit()
    assert shop.recorded.counts()[0] == 3


def test_a_chord_that_is_refused_without_a_transaction_leaves_nothing_behind(installed_url):
    with open_outbox(installed_url, init=False, outbox_require_transaction=True) as outbox:
        shop = Shop(outbox, Database(outbox.engine, outbox.tables))
        with pytest.raises(NoTransaction, match=r"celery\.chord"):
            chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
        assert (shop.recorded.counts(), shop.chords()) == ((0, 0, 0), [])
        with Session(outbox.engine) as session, outbox.use(session):
            chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
            session.commit()
        assert shop.chords() == [("open", 2, 0)]
        shop.run()
        shop.run()
        assert shop.calls == [[1, 2]]


@pytest.mark.parametrize("expected", [False, True])
def test_members_that_cannot_be_counted_do_not_hide_the_others(shop, monkeypatch, expected):
    if expected:
        # Members of chords that did not record them.
        for number in range(4):
            shop.part.apply_async((number,), task_id=f"part-{number}")
    for number in range(4):
        chord([shop.part.s(number).set(task_id=f"part-{number}")])(shop.body.s())
    for number in range(4):
        cancel(shop, f"part-{number}")
    end = shop.members._end

    def refuse_most(chord_id: str, job: Any, position: int | None) -> None:
        if job.id != "part-3":
            raise ConnectionError
        end(chord_id, job, position)

    monkeypatch.setattr(shop.members, "_end", refuse_most)
    monkeypatch.setattr(members, "BATCH", 1)
    # One of four is looked at in each run, the same one 300 times about once in 10 ** 37.
    assert any(shop.members.count() for _ in range(300))
    assert sorted(state for state, *_ in shop.chords()) == ["failed", "open", "open", "open"]


@contextmanager
def statements(shop: Shop) -> Iterator[list[str]]:
    """The statements that are sent in the block."""
    sent: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    event.listen(shop.outbox.engine, "before_cursor_execute", note)
    yield sent
    event.remove(shop.outbox.engine, "before_cursor_execute", note)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_group_of_ten_thousand_is_recorded_all_or_none(shop, end):
    with (
        Session(shop.outbox.engine) as session,
        shop.outbox.use(session),
        statements(shop) as sent,
    ):
        result = group(shop.part.s(number) for number in range(10_000)).apply_async()
        getattr(session, end)()
    assert len(result) == 10_000
    assert shop.recorded.counts()[0] == (10_000 if end == "commit" else 0)
    # Three for five hundred calls.
    assert len(sent) < 70


def test_a_chord_of_thousands_in_one_transaction_costs_a_constant_number_of_statements(shop):
    size = 2_000
    with (
        Session(shop.outbox.engine) as session,
        shop.outbox.use(session),
        statements(shop) as sent,
    ):
        result = chord(shop.part.s(number) for number in range(size))(shop.body.s())
        session.commit()
    assert len(sent) < 30
    assert shop.recorded.counts()[0] == size
    assert shop.chords() == [("open", size, 0)]
    # All but ten are counted in one transaction: workers make one for each.
    members = shop.waiting("shop.part")

    def count_most(connection: Connection, tables: Tables) -> None:
        [chord_id] = connection.execute(select(tables.chord.c.id)).scalars()
        for job_id in members[10:]:
            job = jobs.get(connection, tables, job_id)
            assert job is not None
            part = Part(job_id, True, str(job.chord_position).encode(), "application/json")
            chords.count(connection, tables, chord_id, part, job.chord_position or 0)

    shop.recorded.do(count_most)
    for job_id in members[:10]:
        deliver(shop.part, job_id)
    [body] = shop.waiting("shop.body")
    assert body == result.id
    deliver(shop.body, body)
    assert shop.calls == [list(range(size))]


def test_a_result_that_is_too_large_for_the_body_is_its_error(shop):
    shop.outbox.__dict__.pop("_recorder", None)
    recorder = shop.outbox._recorder
    recorder._max_payload_size = 2_000
    result = chord([shop.part.s("x" * 900) for _ in range(4)])(shop.body.s())
    shop.run(shop.part)
    state, text = shop.reaches(result.id)
    assert state == "FAILURE"
    assert PayloadTooLarge.__name__ in text


@pytest.mark.filterwarnings("ignore:task_allow_error_cb_on_chord_header")
def test_an_error_callback_of_a_chord_is_called_once_where_a_chord_in_its_header_fails(shop):
    inner = chord([shop.part.si(1), shop.refuse.si()], shop.part.si(2))
    outer = chord(group([shop.part.si(3), inner]), shop.body.s())
    outer.link_error(shop.errback.si("failed"))
    outer.delay()
    shop.run(shop.part, shop.refuse)
    shop.members.count()
    assert [state for state, *_ in shop.chords()] == ["failed", "failed"]
    assert len(shop.waiting("shop.errback")) == 1
    assert shop.calls == []


def test_a_group_at_the_end_of_a_chain_in_the_header_is_counted_with_the_header(shop, monkeypatch):
    # Signatures that come out of a message belong to the current app.
    monkeypatch.setattr(_state._tls, "current_app", shop.outbox.app)
    add = add_task(shop.outbox.app, lambda x, y=0: x + y, name="shop.add")
    chord([add.s(1, 1) | group(add.s(1), add.s(2)), add.s(2, 2)])(shop.body.s())
    shop.run(add)
    shop.run(add)
    shop.run(shop.body)
    assert shop.calls == [[[3, 4], 4]]


def test_a_revoked_member_is_a_failed_one(shop):
    result = chord([shop.part.s(1), shop.part.s(2)])(shop.body.s())
    first, second = shop.waiting("shop.part")
    request = shop.recorded.job(first).envelope.headers
    context = Context({**request, "chord": shop.body.s().set(task_id=result.id)})
    shop.outbox.control.cancel(first)
    shop.outbox.app.backend.mark_as_revoked(first, "revoked", request=context)
    deliver(shop.part, second)
    state, text = shop.reaches(result.id)
    assert state == "FAILURE"
    assert TaskRevokedError.__name__ in text


@pytest.mark.parametrize("installed_url", ["sqlite", "postgresql"], indirect=True)
@pytest.mark.parametrize("backend", ["redis://127.0.0.1:1/0", "rpc://", "db+sqlite:////no/where"])
def test_no_call_of_a_canvas_opens_a_connection(shop, monkeypatch, backend):
    shop.outbox.app.conf.update(result_backend=backend, database_create_tables_at_setup=True)
    shop.part.delay(1)

    def refuse(*args: Any) -> None:
        raise AssertionError("a call has opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(type(shop.outbox.app), "_get_backend", refuse)
    nested = group(shop.part.s(3), chain(shop.part.s(4), group(shop.part.s(), shop.part.s())))
    for canvas in (
        group(shop.part.s(1), shop.part.s(2)),
        chord([shop.part.s(1), nested], shop.body.s()),
        chain(shop.part.s(1), group(shop.part.s(), shop.part.s()), shop.body.s(), shop.part.s()),
        shop.part.chunks([(1,), (2,), (3,)], 2),
        shop.part.starmap([(1,), (2,)]),
    ):
        assert canvas.apply_async().id
