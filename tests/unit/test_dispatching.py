from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from celery_outbox.core.dispatching import Obsolete, Overdue, Postpone, Publish, plan
from celery_outbox.core.states import FINAL_STATES, State

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)
EARLIER, LATER = NOW - timedelta(seconds=1), NOW + timedelta(seconds=1)


def planned(state, *, is_copy=False, leased_until=None, expires_at=None):
    return plan(
        is_copy=is_copy, state=state, leased_until=leased_until, expires_at=expires_at, now=NOW
    )


@pytest.mark.parametrize("state", [State.QUEUED, State.RETRYING])
def test_a_waiting_job_is_published_until_its_time_is_over(state):
    assert planned(state) == Publish()
    assert planned(state, expires_at=LATER) == Publish()
    assert planned(state, expires_at=NOW) == Overdue()
    assert planned(state, expires_at=EARLIER) == Overdue()


def test_a_running_job_is_published_again_when_its_lease_has_ended():
    assert planned(State.RUNNING, leased_until=LATER) == Postpone(LATER)
    assert planned(State.RUNNING, leased_until=NOW) == Publish()
    assert planned(State.RUNNING, leased_until=EARLIER) == Publish()


def test_a_running_job_does_not_expire():
    assert planned(State.RUNNING, leased_until=EARLIER, expires_at=EARLIER) == Publish()


@pytest.mark.parametrize("state", sorted({*FINAL_STATES, State.REPLACED}))
def test_a_job_that_has_ended_or_goes_on_as_others_needs_no_message(state):
    assert planned(state, expires_at=EARLIER) == Obsolete()


@pytest.mark.parametrize("state", State)
def test_a_copy_for_the_quarantine_queue_is_sent_in_any_state(state):
    assert planned(state, is_copy=True, leased_until=LATER, expires_at=EARLIER) == Publish()
