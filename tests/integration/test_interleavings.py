"""Whatever the order of events, a job neither succeeds twice nor gets lost."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass
from typing import Any

from celery import Task
from celery.app.trace import trace_ok_t
from celery.exceptions import Ignore, Retry
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, update

from celery_outbox import Outbox
from celery_outbox.context import running_job
from celery_outbox.core.dispatching import Publish, plan
from celery_outbox.core.states import FINAL_STATES, State, is_allowed
from celery_outbox.execute.attempt import Attempt
from celery_outbox.store import journal, messages, publishing, recording
from celery_outbox.store.clock import db_after
from tests.factories import Database, add_task, new_job, open_outbox

MAX_ATTEMPTS = 3


@dataclass
class Copy:
    """A message in the broker; ``redelivered`` when a worker died over it."""

    redelivered: bool = False


class Life(RuleBasedStateMachine):
    """One job, dispatchers, a broker that delivers twice, workers that die, and maintenance."""

    claims = Bundle("claims")
    attempts = Bundle("attempts")

    def __init__(self, outbox: Outbox, task: Task) -> None:
        super().__init__()
        self.outbox, self.task = outbox, task
        self.database = Database(outbox.engine, outbox.tables)
        self.broker: list[Copy] = []
        self.holder: int | None = None
        self.token = self.number = 0
        new = new_job(max_attempts=MAX_ATTEMPTS)
        self.job_id = new.id
        self.database.do(recording.record, new, actor="caller")

    # -- record, dispatch --------------------------------------------------------------

    @rule()
    def the_same_request_comes_again(self) -> None:
        """A stable id finds the first job."""
        again = new_job(self.job_id)
        assert not self.database.do(recording.record, again, actor="caller")

    @rule(target=claims)
    def a_dispatcher_claims(self) -> Any:
        """What it will not publish it drops or gives back, as a dispatcher does."""
        self.number += 1
        name = f"{self.job_id}:{self.number}"
        batch = self.database.do(messages.claim, claim=name, lease=60, limit=10)
        sent = [message for message in batch if self._is_to_be_sent(message, name)]
        return (name, sent) if sent else multiple()

    def _is_to_be_sent(self, message: Any, claim: str) -> bool:
        step = plan(
            is_copy=message.kind == messages.QUARANTINE,
            state=message.state,
            leased_until=message.leased_until,
            expires_at=None,
            now=message.now,
        )
        if isinstance(step, Publish):
            return message.kind == messages.TASK
        if hasattr(step, "until"):
            self.database.do(messages.release, [message.id], claim, due_at=step.until)
        else:
            self.database.do(messages.drop, [message.id])
        return False

    @rule(claim=claims)
    def it_publishes(self, claim: Any) -> None:
        """Any number of times: it may die before the mark."""
        self.broker += [Copy() for _ in claim[1]]

    @rule(claim=consumes(claims))
    def it_publishes_and_marks(self, claim: Any) -> None:
        """The mark counts only for rows that are still its own."""
        name, batch = claim
        self.broker += [Copy() for _ in batch]
        self.database.do(publishing.mark, batch, name, actor="dispatcher")

    @rule(claim=consumes(claims))
    def it_dies(self, claim: Any) -> None:
        """Its rows are free again when its lease ends."""

    # -- execute -----------------------------------------------------------------------

    @precondition(lambda self: self.broker)
    @rule(target=attempts, data=st.data())
    def a_worker_gets_a_message(self, data: Any) -> Any:
        """The guard claims the job, or acknowledges the message."""
        copy = self.broker.pop(data.draw(st.integers(0, len(self.broker) - 1)))
        attempt = self._deliver(copy)
        return multiple() if attempt is None else (attempt, copy)

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
        job = self.database.job(self.job_id)
        assert self.holder is None or job.lease_token > self.holder
        self.holder = job.lease_token
        return met[0]

    @rule(held=consumes(attempts))
    def its_body_returns(self, held: Any) -> None:
        """Only the attempt that holds the lease succeeds."""
        self._settle(held[0], lambda: 1)

    @rule(held=consumes(attempts), error=st.sampled_from([OSError("busy"), ValueError("bad")]))
    def its_body_fails(self, held: Any, error: Exception) -> None:
        """Only the attempt that holds the lease fails the job."""

        def fail() -> None:
            raise error

        self._settle(held[0], fail)

    def _settle(self, attempt: Attempt, body: Any) -> None:
        with contextlib.suppress(Retry, Ignore, OSError, ValueError):
            attempt.execute(body)
        took = not attempt.stale
        assert took == (attempt.lease.token == self.holder), "a stale attempt had its say"
        if took:
            self.holder = None

    @rule(held=consumes(attempts))
    def it_is_killed(self, held: Any) -> None:
        """The broker delivers its message again."""
        self.broker.append(Copy(redelivered=True))

    # -- time, maintenance -------------------------------------------------------------

    @rule()
    def the_lease_ends(self) -> None:
        """Without a heartbeat."""
        job = self.outbox.tables.job
        mine = (job.c.id == self.job_id) & (job.c.state == "running")
        self.database.execute(update(job).where(mine).values(leased_until=db_after(-1)))

    @rule()
    def time_passes(self) -> None:
        """What was to happen later is due; leases of dispatchers end."""
        job, message = self.outbox.tables.job, self.outbox.tables.message
        past = db_after(-1)
        self.database.execute(update(job).where(job.c.id == self.job_id).values(available_at=past))
        self.database.execute(
            update(message).where(message.c.published_at.is_(None)).values(due_at=past)
        )

    @rule()
    def maintenance_runs(self) -> None:
        """It takes back ended leases and no others."""
        self.outbox.maintenance.run()
        self._note_lost_lease()

    def _note_lost_lease(self) -> None:
        if self.database.job(self.job_id).state is not State.RUNNING:
            self.holder = None

    # -- what holds at any time --------------------------------------------------------

    @invariant()
    def the_job_is_as_it_may_be(self) -> None:
        """Counters are bounded, and what has not ended will go on."""
        job = self.database.job(self.job_id)
        assert job.attempt <= job.max_attempts == MAX_ATTEMPTS
        assert job.lease_token >= self.token
        self.token = job.lease_token
        pending = [row.kind for row in self.database.messages(self.job_id)]
        if job.state in (State.QUEUED, State.RETRYING):
            assert "task" in pending or self.broker, "nothing will make the job run"
        assert pending.count("task") <= 1
        assert pending.count("quarantine") <= (job.state is State.QUARANTINED)

    @invariant()
    def the_journal_tells_a_possible_life(self) -> None:
        """One step after the other, all of them permitted, one success at most."""
        lines = self.database.do(journal.read, self.job_id)
        states = [State(line.state) for line in lines if line.state and line.event != "published"]
        steps = [(a, b) for a, b in itertools.pairwise(states) if a is not b]
        assert all(is_allowed(before, after) for before, after in steps)
        assert [line.event for line in lines].count("succeeded") <= 1
        assert states[-1] is self.database.job(self.job_id).state

    def teardown(self) -> None:
        """However it went: with no more trouble the job comes to an end."""
        for _ in range(3 * MAX_ATTEMPTS):
            if self.database.job(self.job_id).state in FINAL_STATES:
                break
            self.the_lease_ends()
            self.maintenance_runs()
            self.time_passes()
            name = f"{self.job_id}:last:{self.token}"
            for message in self.database.do(messages.claim, claim=name, lease=60, limit=10):
                if self._is_to_be_sent(message, name):
                    self.broker.append(Copy())
                    self.database.do(publishing.mark, [message], name, actor="dispatcher")
            while self.broker:
                attempt = self._deliver(self.broker.pop())
                if attempt is not None:
                    self._settle(attempt, lambda: 1)
        assert self.database.job(self.job_id).state in FINAL_STATES, "the job is lost"
        self.database.empty()


def play(url: str, examples: int) -> None:
    with open_outbox(url, init=False) as outbox:
        if outbox.engine.dialect.name == "sqlite":
            # The power does not fail here, and thousands of commits wait for no disk.
            event.listen(
                outbox.engine,
                "connect",
                lambda connection, _: connection.execute("PRAGMA synchronous = OFF"),
            )
        task = add_task(outbox.app)
        run_state_machine_as_test(
            lambda: Life(outbox, task),
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_no_order_of_events_gives_two_successes_or_loses_a_job_on_sqlite(sqlite_installed_url):
    play(sqlite_installed_url, examples=60)


def test_no_order_of_events_gives_two_successes_or_loses_a_job_on_postgresql(
    postgresql_installed_url,
):
    play(postgresql_installed_url, examples=15)
