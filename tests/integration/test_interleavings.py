"""Whatever the order of events, a job neither succeeds twice nor gets lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Task
from celery.app.trace import trace_ok_t
from celery.exceptions import Ignore, Retry
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from sqlalchemy import event, update

from celery_outbox import Outbox
from celery_outbox.context import running_job
from celery_outbox.core.dispatching import Postpone, Publish, plan
from celery_outbox.core.states import FINAL_STATES, State
from celery_outbox.execute.attempt import Attempt
from celery_outbox.store import journal, messages, publishing, recording
from celery_outbox.store.clock import db_after
from tests.factories import Database, add_task, new_job, open_outbox
from tests.steps import is_allowed

MAX_ATTEMPTS = 3


@dataclass
class Copy:
    """A message in the broker; ``redelivered`` when a worker died over it."""

    redelivered: bool = False


class Life:
    """One job among dispatchers, workers that die, a broker that delivers twice, and time.

    Each event takes a number, which picks one of several things that it may happen to; where
    there is nothing, nothing happens. The dispatcher's and the worker's decisions are their own.
    """

    def __init__(self, outbox: Outbox, task: Task) -> None:
        self.outbox, self.task = outbox, task
        self.database = Database(outbox.engine, outbox.tables)
        self.broker: list[Copy] = []
        self.claims: list[tuple[str, list[messages.Message]]] = []
        self.attempts: list[tuple[Attempt, Copy]] = []
        #: The token of the attempt that holds the lease, and the highest token yet.
        self.holder: int | None = None
        self.token = self.number = 0
        new = new_job(max_attempts=MAX_ATTEMPTS)
        self.job_id = new.id
        self.database.do(recording.record, new, actor="caller")

    @property
    def state(self) -> State:
        """Where the job stands."""
        return self.database.job(self.job_id).state

    # -- record, dispatch --------------------------------------------------------------

    def the_same_request_comes_again(self, pick: int) -> None:
        """A stable id finds the first job."""
        again = new_job(self.job_id)
        assert not self.database.do(recording.record, again, actor="caller")

    def a_dispatcher_publishes(self, pick: int) -> None:
        """What it does not mark is published again; what it would not publish it sorts out."""
        if pick:
            self.time_passes(pick)
        self.number += 1
        name = f"{self.job_id}:{self.number}"
        batch = self.database.do(messages.claim, claim=name, lease=60, limit=10)
        sent = [message for message in batch if self._is_to_be_sent(message, name)]
        self.broker += [Copy() for _ in sent]
        if sent:
            self.claims.append((name, sent))

    def _is_to_be_sent(self, message: messages.Message, claim: str) -> bool:
        step = plan(
            is_copy=message.kind == messages.QUARANTINE,
            state=message.state,
            leased_until=message.leased_until,
            expires_at=None,
            now=message.now,
        )
        if isinstance(step, Publish):
            return message.kind == messages.TASK
        if isinstance(step, Postpone):
            self.database.do(messages.release, [message.id], claim, due_at=step.until)
        else:
            self.database.do(messages.drop, [message.id], claim)
        return False

    def a_dispatcher_marks(self, pick: int) -> None:
        """Late or not: the mark counts only for rows that are still its own."""
        if self.claims:
            name, batch = self.claims.pop(pick % len(self.claims))
            self.database.do(publishing.mark, batch, name, actor="dispatcher")

    # -- execute -----------------------------------------------------------------------

    def a_worker_gets_a_message(self, pick: int) -> None:
        """Perhaps not for the first time; the guard claims the job, or acknowledges."""
        if not self.broker:
            self.a_dispatcher_publishes(pick)
        copy = self.broker.pop(pick % len(self.broker)) if self.broker else Copy()
        attempt = self._deliver(copy)
        if attempt is not None:
            self.attempts.append((attempt, copy))

    def _deliver(self, copy: Copy) -> Attempt | None:
        met: list[Any] = []

        def tracer(job_id: str, args: Any, kwargs: Any, request: Any) -> trace_ok_t:
            met.append(running_job.get())
            return trace_ok_t(None, None, 0.0, None)

        where = {"exchange": "", "routing_key": "celery", "redelivered": copy.redelivered}
        request = {"outbox_version": 1, "delivery_info": where}
        self.outbox.guard.trace(self.task, tracer, self.job_id, [], {}, request)
        if not met or met[0].outcome is not None:
            self._note_lost_lease()
            return None
        token = self.database.job(self.job_id).lease_token
        assert token > self.token, "two attempts have one token"
        self.holder = token
        return met[0]

    def a_body_returns(self, pick: int) -> None:
        """Only the attempt that holds the lease succeeds."""
        self._settle(pick, lambda: 1)

    def a_body_fails(self, pick: int) -> None:
        """Only the attempt that holds the lease fails the job, for now or for good."""

        def fail() -> None:
            raise OSError("busy") if pick % 4 else ValueError("bad period")

        self._settle(pick, fail)

    def _settle(self, pick: int, body: Callable[[], Any]) -> None:
        if not self.attempts:
            return
        attempt, _ = self.attempts.pop(pick % len(self.attempts))
        with contextlib.suppress(Retry, Ignore, OSError, ValueError):
            attempt.execute(body)
        held = attempt.lease.token == self.holder
        assert attempt.stale != held, "a stale attempt had its say, or the holder had none"
        if held:
            self.holder = None

    def a_worker_is_killed(self, pick: int) -> None:
        """The broker delivers its message again."""
        if self.attempts:
            self.attempts.pop(pick % len(self.attempts))
            self.broker.append(Copy(redelivered=True))

    # -- time, maintenance, a person ---------------------------------------------------

    def the_lease_ends(self, pick: int) -> None:
        """Without a heartbeat; maintenance may notice at once."""
        job = self.outbox.tables.job
        mine = (job.c.id == self.job_id) & (job.c.state == "running")
        self.database.execute(update(job).where(mine).values(leased_until=db_after(-1)))
        if pick == 3:
            self.maintenance_runs(pick)

    def time_passes(self, pick: int) -> None:
        """What was to happen later is due; leases of dispatchers end."""
        job, message = self.outbox.tables.job, self.outbox.tables.message
        past = db_after(-1)
        self.database.execute(update(job).values(available_at=past))
        self.database.execute(
            update(message).where(message.c.published_at.is_(None)).values(due_at=past)
        )

    def maintenance_runs(self, pick: int) -> None:
        """It takes back ended leases and no others."""
        self.outbox.maintenance.run()
        self._note_lost_lease()

    def a_person_replays_it(self, pick: int) -> None:
        """With all attempts before it."""
        if self.state is State.QUARANTINED:
            self.outbox.control.replay(self.job_id)

    def _note_lost_lease(self) -> None:
        if self.state is not State.RUNNING:
            self.holder = None

    # -- what holds at any time --------------------------------------------------------

    def check(self) -> None:
        """Counters are bounded, the journal is possible, and what has not ended will go on."""
        job = self.database.job(self.job_id)
        assert job.attempt <= job.max_attempts == MAX_ATTEMPTS
        assert job.lease_token >= self.token
        self.token = job.lease_token
        pending = [row for row in self.database.messages(self.job_id) if row.kind == "task"]
        if job.state in (State.QUEUED, State.RETRYING):
            assert pending or self.broker, "nothing will make the job run"
        lines = self.database.do(journal.read, self.job_id)
        states = [State(line.state) for line in lines if line.state and line.event != "published"]
        steps = [(a, b) for a, b in itertools.pairwise(states) if a is not b]
        assert all(is_allowed(before, after) for before, after in steps)
        assert states[-1] is job.state
        assert [line.event for line in lines].count("succeeded") == (job.state is State.SUCCEEDED)

    def end(self) -> None:
        """Without more trouble the job comes to an end, however it went so far."""
        for _ in range(2 * MAX_ATTEMPTS):
            if self.state in FINAL_STATES:
                return
            self.the_lease_ends(0)
            self.maintenance_runs(0)
            self.time_passes(0)
            self.a_dispatcher_publishes(0)
            while self.broker:
                self.attempts.clear()
                self.a_worker_gets_a_message(0)
                self.a_body_returns(0)
            self.check()
        raise AssertionError("the job is lost")


#: How often each event comes, by repetition.
EVENTS: list[Callable[[Life, int], None]] = [
    Life.the_same_request_comes_again,
    *[Life.a_dispatcher_publishes] * 2,
    *[Life.a_dispatcher_marks] * 2,
    *[Life.a_worker_gets_a_message] * 6,
    *[Life.a_body_returns] * 2,
    *[Life.a_body_fails] * 2,
    Life.a_worker_is_killed,
    *[Life.the_lease_ends] * 4,
    Life.time_passes,
    Life.maintenance_runs,
    Life.a_person_replays_it,
]
HISTORIES = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(0, 3)), min_size=15, max_size=40
)


def play(url: str, examples: int) -> None:
    with open_outbox(url, init=False) as outbox:
        if outbox.engine.dialect.name == "sqlite":
            # The power does not fail here, and thousands of commits need not wait for a disk.
            event.listen(
                outbox.engine,
                "connect",
                lambda connection, _: connection.execute("PRAGMA synchronous = OFF"),
            )
        task = add_task(outbox.app)

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # Each step is a transaction or two: to shrink a history would take minutes.
            phases=[Phase.reuse, Phase.generate],
        )
        @given(HISTORIES)
        def happen(history: list[tuple[Callable[[Life, int], None], int]]) -> None:
            Database(outbox.engine, outbox.tables).empty()
            life = Life(outbox, task)
            for step, pick in history:
                note(step.__name__)
                step(life, pick)
                life.check()
            life.end()

        happen()


def test_no_order_of_events_gives_two_successes_or_loses_a_job_on_sqlite(sqlite_installed_url):
    play(sqlite_installed_url, examples=60)


def test_no_order_of_events_gives_two_successes_or_loses_a_job_on_postgresql(
    postgresql_installed_url,
):
    play(postgresql_installed_url, examples=15)
