"""The crash matrix notices what it is there to notice."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from celery_outbox.core.states import State
from celery_outbox.store.job import Job
from celery_outbox.store.journal import Event
from tests.acceptance.crash.invariants import broken

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def line(event: str, state: str | None, attempt: int) -> Event:
    return Event("export-42", NOW, event, state, attempt, None, None, None)


JOURNAL = [
    line("recorded", "queued", 0),
    line("published", None, 0),
    line("claimed", "running", 1),
    line("rescued", "retrying", 1),
    line("deferred", "retrying", 1),
    line("claimed", "running", 2),
    line("succeeded", "succeeded", 2),
    line("duplicate", "succeeded", 2),
]

JOB = Job(
    **{
        **dict.fromkeys(Job.__dataclass_fields__),
        "id": "export-42",
        "state": State.SUCCEEDED,
        "attempt": 2,
        "max_attempts": 3,
        "deliveries": 4,
        "lease_token": 2,
    }
)


def test_a_whole_journal_is_in_order() -> None:
    assert broken(JOURNAL, JOB) == []


@pytest.mark.parametrize("missing", [0, 2, 3, 4, 5, 6, 7])
def test_a_missing_line_is_noticed(missing: int) -> None:
    assert broken([each for each in JOURNAL if each is not JOURNAL[missing]], JOB) != []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempt": 1}, "it ends with"),
        ({"state": State.QUEUED}, "it ends with"),
        ({"max_attempts": 1}, "2 attempts of 1"),
        ({"lease_token": 3}, "lease token 3"),
        ({"deliveries": 5}, "5 deliveries"),
        ({"leased_by": "worker"}, "worker holds it"),
    ],
)
def test_a_row_that_the_journal_does_not_explain_is_noticed(
    change: dict[str, object], words: str
) -> None:
    assert words in " ".join(broken(JOURNAL, replace(JOB, **change)))


def test_an_attempt_that_is_counted_twice_is_noticed() -> None:
    twice = [replace(each, attempt=3) if each is JOURNAL[5] else each for each in JOURNAL]

    assert broken(twice, JOB) == ["claimed says attempt 3, not 2"]
