from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_outbox import RetryPolicy
from celery_outbox.core.classification import Verdict
from celery_outbox.core.reasons import Reason
from celery_outbox.core.retry import GiveUp, RetryIn, after_failure

RANDOM = st.floats(0, 1, exclude_max=True)
POLICIES = st.builds(
    RetryPolicy,
    max_attempts=st.integers(1, 1000),
    delay=st.floats(0, 1e6),
    factor=st.floats(1, 1e9),
    max_delay=st.floats(0, 1e6),
    jitter=st.floats(0, 1),
)
DEFAULT = RetryPolicy()
MAY_PASS = Verdict(False, "OSError")


def follow(verdict=MAY_PASS, *, attempt=1, max_attempts=3, random=0.0, policy=DEFAULT):
    return after_failure(
        verdict, attempt=attempt, max_attempts=max_attempts, policy=policy, random=random
    )


def test_the_delay_doubles_up_to_the_ceiling():
    policy = RetryPolicy(delay=5, factor=2, max_delay=60, jitter=0)
    assert [policy.delay_after(n, 0.5) for n in (1, 2, 3, 4, 5, 6)] == [5, 10, 20, 40, 60, 60]


@given(POLICIES, st.integers(1, 100_000), RANDOM)
def test_a_delay_is_never_longer_than_the_ceiling_nor_shorter_than_jitter_permits(
    policy, attempt, random
):
    full = policy.delay_after(attempt, 0.0)
    assert 0 <= full <= policy.max_delay
    assert full * (1 - policy.jitter) <= policy.delay_after(attempt, random) <= full


@given(POLICIES, st.integers(1, 1000))
def test_delays_do_not_shrink(policy, attempt):
    assert policy.delay_after(attempt, 0) <= policy.delay_after(attempt + 1, 0)


def test_jitter_spreads_over_its_whole_share():
    policy = RetryPolicy(delay=10, jitter=0.5)
    assert policy.delay_after(1, 0.0) == 10
    assert policy.delay_after(1, 0.5) == 7.5
    assert policy.delay_after(1, 0.999) == pytest.approx(5, abs=0.01)


@pytest.mark.parametrize(
    "values",
    [
        {"max_attempts": 0},
        {"max_attempts": -1},
        {"delay": -0.1},
        {"max_delay": -1},
        {"factor": 0.9},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"delay": float("nan")},
        {"max_delay": float("nan")},
        {"factor": float("nan")},
        {"jitter": float("nan")},
        {"max_delay": float("inf")},
    ],
    ids=str,
)
def test_a_policy_outside_its_bounds_cannot_be_made(values):
    with pytest.raises(ValueError, match=r"at least 1|negative|between 0 and 1|finite"):
        RetryPolicy(**values)


def test_a_failure_that_may_pass_is_retried_until_the_last_attempt():
    assert follow(attempt=1) == RetryIn(5)
    assert follow(attempt=2) == RetryIn(10)
    assert follow(attempt=3) == GiveUp(Reason.ATTEMPTS_EXHAUSTED)
    assert follow(attempt=4) == GiveUp(Reason.ATTEMPTS_EXHAUSTED)


def test_the_jobs_own_limit_counts_and_not_the_policys():
    policy = RetryPolicy(max_attempts=1)
    assert isinstance(follow(attempt=4, max_attempts=5, policy=policy), RetryIn)


def test_a_permanent_failure_is_never_retried():
    assert follow(Verdict(True, "ValueError")) == GiveUp(Reason.PERMANENT)
    rejected = Verdict(True, "Reject", reason=Reason.REJECTED)
    assert follow(rejected) == GiveUp(Reason.REJECTED)


def test_a_lost_worker_keeps_its_own_reason_when_the_attempts_are_used_up():
    lost = Verdict(False, "lost_worker", reason=Reason.LOST_WORKER)
    assert isinstance(follow(lost, attempt=2), RetryIn)
    assert follow(lost, attempt=3) == GiveUp(Reason.LOST_WORKER)


@given(RANDOM)
def test_retry_after_is_a_lower_bound_even_above_the_ceiling(random):
    policy = RetryPolicy(delay=5, max_delay=60)
    asked = Verdict(False, "HTTPError:429", retry_after=300)
    assert follow(asked, random=random, policy=policy) == RetryIn(300)


def test_a_short_retry_after_does_not_shorten_the_delay():
    assert follow(Verdict(False, "HTTPError:429", retry_after=1)) == RetryIn(5)
