from __future__ import annotations

import pytest

from tests.wait import eventually


def test_the_first_true_value_is_returned():
    values = iter([0, "", "ready", "later"])
    assert eventually(lambda: next(values), interval=0) == "ready"


def test_an_exception_counts_as_not_yet():
    answers = iter([ConnectionError, "up"])

    def check():
        answer = next(answers)
        if answer is ConnectionError:
            raise ConnectionError("refused")
        return answer

    assert eventually(check, interval=0) == "up"


def test_at_the_deadline_the_message_has_the_last_value():
    with pytest.raises(AssertionError, match=r"queue is not empty within 0 s; last value \[\]"):
        eventually(list, deadline=0, message="queue is not empty")


def test_at_the_deadline_the_last_exception_is_the_cause():
    with pytest.raises(AssertionError, match=r"last error ZeroDivisionError") as raised:
        eventually(lambda: 1 / 0, deadline=0)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
