from __future__ import annotations

import email.message
import http
import types
import urllib.error
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_outbox.core.classification import MAX_RETRY_AFTER, Verdict, classify

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=timezone.utc)


class Headers(dict[str, Any]):
    """As clients have them: names are found in any case."""

    def get(self, name, default=None):
        return next((v for k, v in self.items() if k.lower() == name.lower()), default)


class Response:
    """As requests and httpx have it; requests' is false when it is an error."""

    def __init__(self, status: int, headers: dict[str, Any]) -> None:
        self.status_code = status
        self.headers = Headers(headers)

    def __bool__(self) -> bool:
        return self.status_code < 400


class HTTPStatusError(Exception):
    """The shape of requests' and httpx's error."""

    def __init__(self, status: int, headers: dict[str, Any]) -> None:
        super().__init__(f"{status} for https://user:s3cret@example.org")
        self.response = Response(status, headers)


class ClientResponseError(Exception):
    """The shape of aiohttp's error."""

    def __init__(self, status: int, headers: dict[str, Any]) -> None:
        super().__init__(f"{status} for https://user:s3cret@example.org")
        self.status = status
        self.headers = Headers(headers)


def urllib_error(status: int, headers: dict[str, Any]) -> urllib.error.HTTPError:
    message = email.message.Message()
    for name, value in headers.items():
        message[name] = value
    error = urllib.error.HTTPError("https://example.org/s3cret", status, "s3cret", message, None)
    error.close()
    return error


CLIENTS = pytest.mark.parametrize(
    "http_error", [HTTPStatusError, ClientResponseError, urllib_error], ids=lambda c: c.__name__
)


def verdict(error: BaseException, **options) -> Verdict:
    return classify(error, now=NOW, **options)


@CLIENTS
@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 405, 409, 410, 413, 422, 426, 428, 451, 499]
)
def test_a_client_error_is_permanent(http_error, status):
    assert verdict(http_error(status, {})).permanent


@CLIENTS
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599, 301, 304])
def test_timeout_too_early_too_many_and_server_errors_may_pass(http_error, status):
    assert not verdict(http_error(status, {})).permanent


@CLIENTS
def test_the_error_code_has_the_status_and_no_text(http_error):
    code = verdict(http_error(404, {})).error_code
    assert code.endswith(":404")
    assert "s3cret" not in code


def test_a_status_of_the_enum_is_a_number_in_the_error_code():
    assert verdict(HTTPStatusError(http.HTTPStatus.NOT_FOUND, {})).error_code.endswith(":404")


@CLIENTS
@pytest.mark.parametrize("name", ["Retry-After", "retry-after"])
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120),
        (" 120 ", 120),
        ("0", 0),
        ("Sat, 31 Jan 2026 12:02:00 GMT", 120),
        ("Sat, 31 Jan 2026 14:02:00 +0200", 120),
        ("Sat, 31 Jan 2026 11:00:00 GMT", 0),
        ("99999999", MAX_RETRY_AFTER),
        ("9" * 6000, MAX_RETRY_AFTER),
        ("Sat, 31 Jan 2126 12:02:00 GMT", MAX_RETRY_AFTER),
        ("soon", None),
        ("-5", None),
        ("1.5", None),
        ("", None),
        ("\u0661\u0662", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date_and_bounded(http_error, name, value, seconds):
    assert verdict(http_error(429, {name: value})).retry_after == seconds


def test_no_answer_at_all_may_pass():
    # requests' ConnectionError: there is a response attribute, and nothing in it.
    error = HTTPStatusError(500, {})
    error.response = None
    assert verdict(error) == Verdict(False, f"{__name__}.HTTPStatusError")


@pytest.mark.parametrize("status", [None, "404", True, 0, 99, 600, 404.0, 10**30, object()])
def test_what_is_no_http_status_does_not_count_as_one(status):
    assert not verdict(HTTPStatusError(status, {}) if status != 0 else OSError()).permanent
    assert ":" not in verdict(ClientResponseError(status, {})).error_code


def test_the_tasks_list_overrules_the_status():
    assert not verdict(HTTPStatusError(404, {}), retry_for=(HTTPStatusError,)).permanent
    assert verdict(HTTPStatusError(503, {}), permanent_for=(HTTPStatusError,)).permanent


DATES = st.from_regex(
    r"(Mon, )?\d{1,3} (Jan|Feb|XYZ) \d{1,6} \d{1,3}:\d{1,3}:\d{1,3} ([+-]\d{1,12}|GMT)",
    fullmatch=True,
)


@given(st.one_of(st.text(), st.binary(), st.none(), st.integers(), st.floats(), DATES))
@example("Mon, 32 Jan 2026 25:61:61 GMT")
@example("Mon, 01 Jan 0001 00:00:00 +2359")
@example("Fri, 31 Dec 9999 23:59:59 -2359")
@example("Mon, 01 Jan 99999 00:00:00 GMT")
def test_a_hostile_header_never_raises(value):
    wait = verdict(HTTPStatusError(503, {"Retry-After": value})).retry_after
    assert wait is None or 0 <= wait <= MAX_RETRY_AFTER


class Raising:
    """Whatever is looked up on it raises what is no AttributeError."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} has not been set")


class PropertyError(Exception):
    """httpx raises RuntimeError from a property that was not set."""

    @property
    def response(self) -> Any:
        """Not set."""
        raise RuntimeError("the response has not been set")


def test_an_error_whose_attributes_raise_is_classified_all_the_same():
    assert not verdict(PropertyError()).permanent
    error = OSError("x")
    error.response = Raising()
    assert not verdict(error).permanent


def test_headers_that_cannot_be_asked_count_as_none():
    def refuse(*names):
        raise RuntimeError("closed")

    error = ClientResponseError(503, {})
    error.headers = types.SimpleNamespace(get=refuse)
    assert verdict(error).retry_after is None
