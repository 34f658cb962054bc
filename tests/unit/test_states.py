from __future__ import annotations

import itertools

import pytest

from celery_outbox.core import states
from celery_outbox.core.states import FINAL_STATES, TRANSITIONS, State
from tests.steps import is_allowed

#: The table of the design, written out a second time by hand.
ALLOWED = {
    (None, "queued"),
    (None, "quarantined"),
    ("queued", "running"),
    ("queued", "quarantined"),
    ("queued", "cancelled"),
    ("queued", "expired"),
    ("queued", "relayed"),
    ("running", "running"),  # a new attempt after the lease has ended
    ("running", "retrying"),
    ("running", "replaced"),  # by a canvas whose last step has the job's id
    ("replaced", "queued"),
    ("replaced", "cancelled"),
    ("running", "succeeded"),
    ("running", "quarantined"),
    ("retrying", "running"),
    ("retrying", "quarantined"),
    ("retrying", "cancelled"),
    ("retrying", "expired"),
    ("retrying", "relayed"),
    ("relayed", "queued"),  # its message came to a worker of this app after all
    ("relayed", "quarantined"),
    ("quarantined", "queued"),
    ("quarantined", "succeeded"),
    ("quarantined", "cancelled"),
}

PAIRS = list(itertools.product([None, *State], State))


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
def test_a_job_goes_from_one_state_to_another_exactly_where_the_design_says(before, after):
    assert is_allowed(before, after) == ((before and str(before), str(after)) in ALLOWED)


def test_only_a_person_leads_a_job_out_of_a_final_state():
    by_a_person = {states.Transition.REPLAY, states.Transition.RESOLVE, states.Transition.DISCARD}
    others = FINAL_STATES - {State.RELAYED}
    leaving = {each for each, (before, _) in TRANSITIONS.items() if before & others}
    assert leaving == by_a_person


def test_only_a_worker_that_gets_its_message_takes_a_relayed_job():
    leaving = {each for each, (before, _) in TRANSITIONS.items() if State.RELAYED in before}
    assert leaving == {states.Transition.ADOPT, states.Transition.QUARANTINE}


def test_every_state_is_final_or_can_be_left():
    stuck = {s for s in State if not any(is_allowed(s, after) for after in State)}
    assert stuck == FINAL_STATES - {State.QUARANTINED, State.RELAYED}


@pytest.mark.parametrize("transition", states.Transition)
def test_sources_and_target_repeat_the_table(transition):
    before, after = TRANSITIONS[transition]
    assert states.sources(transition) == before - {None}
    assert states.target(transition) is after


def test_states_and_transitions_print_as_the_words_that_are_stored():
    assert f"{State.QUEUED} {states.Transition.CLAIM}" == "queued claimed"
