from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_outbox.core.backoff import Backoff


def test_pauses_double_up_to_the_ceiling():
    backoff = Backoff(0.2, 1.0)
    assert [backoff.next(0) for _ in range(5)] == [0.2, 0.4, 0.8, 1.0, 1.0]


def test_half_of_a_pause_is_random():
    assert Backoff(1, 10).next(0) == 1
    assert Backoff(1, 10).next(0.5) == 0.75


@given(st.floats(0, 1, exclude_max=True))
def test_a_long_outage_neither_overflows_nor_hurries(random):
    backoff = Backoff(0.2, 30)
    pauses = [backoff.next(random) for _ in range(2000)]
    assert 15 <= min(pauses[10:]) <= max(pauses) <= 30


def test_the_first_pause_respects_a_low_ceiling():
    assert Backoff(5, 2).next(0) == 2


def test_after_a_reset_pauses_begin_again():
    backoff = Backoff(0.2, 30)
    for _ in range(9):
        backoff.next(0)
    backoff.reset()
    assert backoff.next(0) == 0.2
