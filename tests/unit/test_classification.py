from __future__ import annotations

import errno
import json
from datetime import datetime, timezone

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_outbox import PermanentError, RetryableError
from celery_outbox.core.classification import MAX_ERROR_CODE, Verdict, classify
from celery_outbox.core.reasons import Reason
from celery_outbox.exceptions import UnserializableArgument

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)


class PaymentError(Exception):
    """An error of a user's own."""


class CardDeclined(PaymentError):
    """One that is nearer to the error."""


class ValidationError(Exception):
    """Django's and marshmallow's derive from Exception alone."""


def verdict(error: BaseException, **options) -> Verdict:
    return classify(error, now=NOW, **options)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("x"),
        ValueError("x"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
        json.JSONDecodeError("x", "", 0),
        KeyError("x"),
        IndexError("x"),
        LookupError("x"),
        AttributeError("x"),
        NameError("x"),
        UnboundLocalError("x"),
        ZeroDivisionError("x"),
        OverflowError("x"),
        AssertionError("x"),
        ModuleNotFoundError("x"),
        NotImplementedError("x"),
        SyntaxError("x"),
        ValidationError("x"),
        PermanentError("x"),
        UnserializableArgument(task="t", argument="a", kind="object", serializer="json"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_programming_and_validation_errors_are_permanent(error):
    assert verdict(error).permanent


@pytest.mark.parametrize(
    "error",
    [
        Exception("x"),
        RuntimeError("x"),
        RecursionError("x"),
        OSError("x"),
        ConnectionResetError("x"),
        TimeoutError("x"),
        MemoryError("x"),
        EOFError("x"),
        PaymentError("x"),
        RetryableError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_error_may_pass(error):
    assert verdict(error) == Verdict(False, verdict(error).error_code)


def test_a_soft_time_limit_may_pass_and_keeps_its_own_reason():
    assert verdict(SoftTimeLimitExceeded()).reason is Reason.TIME_LIMIT
    assert not verdict(SoftTimeLimitExceeded()).permanent


def test_the_tasks_lists_overrule_the_defaults():
    assert verdict(OSError("x"), permanent_for=(OSError,)).permanent
    assert not verdict(ValueError("x"), retry_for=(ValueError,)).permanent
    assert verdict(ConnectionResetError(), permanent_for=(OSError,)).permanent


@pytest.mark.parametrize("error", [CardDeclined("x"), PaymentError("x")])
def test_the_class_nearer_to_the_error_wins_between_the_two_lists(error):
    is_near = isinstance(error, CardDeclined)
    lists = {"permanent_for": (CardDeclined,), "retry_for": (PaymentError,)}
    assert verdict(error, **lists).permanent == is_near
    swapped = {"permanent_for": (PaymentError,), "retry_for": (CardDeclined,)}
    assert verdict(error, **swapped).permanent == (not is_near)


def test_what_the_body_says_outright_overrules_the_lists():
    lists = {"permanent_for": (Exception,), "retry_for": (Exception,)}
    assert verdict(PermanentError("x"), **lists).permanent
    assert not verdict(RetryableError("x"), **lists).permanent


@pytest.mark.parametrize("error", [PermanentError("x"), RetryableError("x"), OSError("x")])
def test_the_classify_hook_overrules_everything(error):
    lists = {"permanent_for": (OSError,), "retry_for": (OSError,)}
    assert verdict(error, hook=lambda error: "permanent", **lists).permanent
    assert not verdict(error, hook=lambda error: "retryable", **lists).permanent


def test_a_hook_that_has_no_opinion_leaves_it_to_the_defaults():
    asked = []
    assert verdict(ValueError("x"), hook=asked.append).permanent
    assert not verdict(OSError("x"), hook=asked.append).permanent
    assert [type(error) for error in asked] == [ValueError, OSError]


@pytest.mark.parametrize("answer", [True, False, "", "PERMANENT", 1])
def test_a_hook_that_answers_anything_else_is_an_error(answer):
    with pytest.raises(ValueError, match="classify must answer"):
        verdict(OSError("x"), hook=lambda error: answer)


def test_a_retryable_error_names_its_own_pause():
    assert verdict(RetryableError("x", retry_after=90)).retry_after == 90
    assert verdict(RetryableError("x", retry_after=0)).retry_after == 0
    assert verdict(RetryableError("x")).retry_after is None


@pytest.mark.parametrize("pause", [1e18, float("inf")], ids=str)
def test_the_pause_of_a_retryable_error_is_one_that_a_database_can_add_to_its_clock(pause):
    assert 0 <= verdict(RetryableError("x", retry_after=pause)).retry_after <= 366 * 86400


@pytest.mark.parametrize(
    "error",
    [
        ValueError("s3cret"),
        KeyError("s3cret"),
        PaymentError("s3cret"),
        OSError(5, "s3cret", "s3cret"),
        RetryableError("s3cret"),
        PermanentError("s3cret"),
        type("Odd", (Exception,), {"code": "s3cret", "status": "s3cret"})("s3cret"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_code_never_has_the_errors_text(error):
    code = verdict(error).error_code
    assert "s3cret" not in code
    assert type(error).__name__ in code


@pytest.mark.parametrize("name", ["X" * 5000, "a\nb", "a\x00b", "a b;--"])
def test_an_error_code_fits_its_column_whatever_the_class_is_called(name):
    code = verdict(type(name.replace("\x00", "\\0"), (Exception,), {})()).error_code
    assert len(code) <= MAX_ERROR_CODE
    assert code.isprintable()
    assert " " not in code


def test_the_error_code_of_a_builtin_has_no_module_and_any_other_has():
    assert verdict(ValueError("x")).error_code == "ValueError"
    assert verdict(PaymentError("x")).error_code == f"{__name__}.PaymentError"


def test_a_full_disk_is_told_from_other_errors_of_the_operating_system():
    full = verdict(OSError(errno.ENOSPC, "No space left on device", "/reports/s3cret.csv"))
    assert full == Verdict(False, "OSError:ENOSPC")
    # Where Python has a class for the number, its name says it already.
    assert verdict(OSError(errno.ECONNREFUSED, "x")).error_code == "ConnectionRefusedError"
    assert verdict(OSError(123456, "x")).error_code == "OSError"
    assert verdict(OSError("x")).error_code == "OSError"
