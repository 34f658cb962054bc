from __future__ import annotations

import copy
import pickle
import string

import pytest

import celery_outbox
from celery_outbox import JobQuarantined, PermanentError, RetryableError, exceptions
from celery_outbox.exceptions import OutboxError


def subclasses(kind: type) -> list[type]:
    return [kind, *(each for child in kind.__subclasses__() for each in subclasses(child))]


def facts_of(kind: type[OutboxError]) -> dict[str, str]:
    names = {name for _, name, _, _ in string.Formatter().parse(kind.__doc__ or "") if name}
    return {name: f"<{name}>" for name in names}


KINDS = pytest.mark.parametrize("kind", subclasses(OutboxError), ids=lambda kind: kind.__name__)


@KINDS
def test_the_message_is_one_line_that_has_every_fact(kind):
    facts = facts_of(kind)
    text = str(kind(**facts))
    assert "\n" not in text
    assert "  " not in text
    assert all(value in text for value in facts.values())


@KINDS
def test_facts_are_attributes(kind):
    error = kind(**facts_of(kind))
    for name, value in facts_of(kind).items():
        assert getattr(error, name) == value
    with pytest.raises(AttributeError):
        _ = error.nothing_of_the_kind


@KINDS
@pytest.mark.parametrize(
    "twin", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_an_error_survives_pickling_as_workers_do_it(kind, twin):
    error = kind(**facts_of(kind))
    again = twin(error)
    assert type(again) is kind
    assert str(again) == str(error)
    assert again.facts == error.facts


def test_facts_with_braces_do_not_confuse_the_message():
    error = exceptions.UnknownJob(job_id="{0} {job_id} {")
    assert "{0} {job_id} {" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        PermanentError("bad period"),
        RetryableError("busy", retry_after=5),
        RetryableError(),
        JobQuarantined("job-1", "permanent", "ValueError"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_task_bodies_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_a_quarantined_job_tells_its_reason():
    error = JobQuarantined("job-1", "permanent", "ValueError")
    assert str(error) == "job 'job-1' is in quarantine: permanent (ValueError)"


def test_every_error_that_a_user_may_catch_is_public():
    private = {
        "NotInJob",
        "NotReplayable",
        "InvalidResultKey",
        "InvalidStoreKey",
        "ResultStoreError",
    }
    names = {kind.__name__ for kind in subclasses(OutboxError)} - private
    assert names <= set(celery_outbox.__all__)
