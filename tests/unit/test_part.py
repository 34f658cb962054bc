"""Parts of a job's life: what begins a new one, and how many attempts it has."""

from __future__ import annotations

from celery_outbox.core.part import Part

SECOND = Part(1, 2, 5)


def test_a_retry_because_of_an_error_stays_in_its_part():
    assert SECOND.again(3, allowed=3) == SECOND


def test_who_asks_by_hand_for_one_attempt_more_gets_it():
    assert SECOND.again(5, allowed=3) == Part(1, 2, 6)


def test_a_round_of_a_poll_loop_is_a_part_with_all_attempts_and_counts_retries_on():
    assert SECOND.on(5, allowed=3) == Part(2, 2, 8)


def test_a_replacement_is_a_part_with_all_attempts_and_no_retries():
    assert SECOND.replaced(4, allowed=7) == Part(2, 4, 11)
