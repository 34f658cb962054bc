from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_outbox.core.decisions import (
    Defer,
    Drop,
    Expire,
    FailAgain,
    GiveUpLost,
    JobFacts,
    ReturnStored,
    Run,
    Unknown,
    decide,
)
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import State

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)
EARLIER, LATER = NOW - timedelta(seconds=1), NOW + timedelta(seconds=1)


def job(state: State, attempt: int = 1, **times: datetime) -> JobFacts:
    return JobFacts(state=state, attempt=attempt, max_attempts=3, **times)


@pytest.mark.parametrize("redelivered", [False, True])
@pytest.mark.parametrize(
    ("facts", "decision"),
    [
        (None, Unknown()),
        (job(State.QUEUED), Run()),
        (job(State.QUEUED, available_at=EARLIER), Run()),
        (job(State.QUEUED, available_at=NOW), Run()),
        (job(State.QUEUED, available_at=LATER), Defer(LATER)),
        (job(State.RETRYING, available_at=LATER), Defer(LATER)),
        (job(State.RETRYING, available_at=EARLIER), Run()),
        (job(State.QUEUED, expires_at=NOW), Expire()),
        (job(State.QUEUED, expires_at=EARLIER, available_at=LATER), Expire()),
        (job(State.RETRYING, expires_at=EARLIER), Expire()),
        (job(State.QUEUED, expires_at=LATER), Run()),
        (job(State.RUNNING, leased_until=LATER), Defer(LATER)),
        (job(State.RUNNING, leased_until=NOW), Run()),
        (job(State.RUNNING, leased_until=EARLIER), Run()),
        (job(State.RUNNING, leased_until=EARLIER, expires_at=EARLIER), Run()),
        (job(State.RUNNING, attempt=3, leased_until=LATER), Defer(LATER)),
        (job(State.RUNNING, attempt=3, leased_until=EARLIER), GiveUpLost(Reason.LOST_WORKER)),
        (job(State.RUNNING, attempt=4, leased_until=EARLIER), GiveUpLost(Reason.LOST_WORKER)),
        (job(State.SUCCEEDED), ReturnStored()),
        (job(State.SUCCEEDED, expires_at=EARLIER), ReturnStored()),
        (job(State.CANCELLED), Drop()),
        (job(State.EXPIRED), Drop()),
        (job(State.RELAYED), Drop()),
        (job(State.REPLACED), Drop()),
    ],
)
def test_a_delivery_is_decided_by_the_jobs_row(facts, decision, redelivered):
    assert decide(facts, now=NOW, redelivered=redelivered) == decision


def test_a_quarantined_jobs_message_that_came_back_fails_again_and_a_second_copy_is_dropped():
    assert decide(job(State.QUARANTINED), now=NOW, redelivered=True) == FailAgain()
    assert decide(job(State.QUARANTINED), now=NOW, redelivered=False) == Drop()


@pytest.mark.parametrize("state", State)
def test_no_state_leaves_a_delivery_undecided(state):
    facts = job(state, leased_until=LATER if state is State.RUNNING else None)
    assert decide(facts, now=NOW, redelivered=False) is not None
