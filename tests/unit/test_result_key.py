from __future__ import annotations

import pytest

from celery_outbox.core.result_key import MAX_KEY, check_key, fill_result_key
from celery_outbox.exceptions import InvalidResultKey, InvalidStoreKey

BAD_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    ".",
    "./a",
    "a/./b",
    "a//b",
    "a/",
    "a\x00b",
    "a\nb",
    "a\\b",
    "..\\x",
    "x" * (MAX_KEY + 1),
    "folder/" + "x" * 256,
    "\u00e9" * 128,
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key[:12]))
def test_a_key_that_no_store_can_use_is_refused(key):
    with pytest.raises(InvalidStoreKey, match="cannot be a key of a result store"):
        check_key(key)


@pytest.mark.parametrize(
    "key", ["a", "a/b.csv", "...", "a..b", ".hidden", "отчёт/январь.csv", "x" * 255]
)
def test_a_relative_path_is_a_key(key):
    assert check_key(key) == key


def fill(template, args=(), kwargs=None, job_id="job-1"):
    return fill_result_key("shop.export", template, job_id, args, kwargs or {})


def test_a_template_is_filled_with_id_and_arguments():
    assert fill("r/{job_id}.csv") == "r/job-1.csv"
    assert fill("r/{0}/{1}.csv", (42, "2026-01")) == "r/42/2026-01.csv"
    assert fill("r/{account}.csv", kwargs={"account": 42}) == "r/42.csv"
    assert fill("r/{0:05d}", (42,)) == "r/00042"
    assert fill(None) is None


def test_an_argument_cannot_take_the_place_of_the_job_id():
    assert fill("r/{job_id}", kwargs={"job_id": "other"}) == "r/job-1"


@pytest.mark.parametrize(
    "template", ["{0}", "{account}", "{", "{}{", "{0.missing}", "{job_id.missing}", "{job_id[x]}"]
)
def test_a_template_that_the_call_cannot_fill_names_the_task(template):
    with pytest.raises(InvalidResultKey, match=r"Task shop\.export has no usable result key"):
        fill(template)


@pytest.mark.parametrize("argument", ["..", "../../etc/passwd", "/etc/passwd", "a\x00b", ""])
def test_an_argument_cannot_lead_out_of_the_store(argument):
    with pytest.raises(InvalidResultKey):
        fill("{0}", (argument,))


def test_a_result_key_fits_its_column_with_the_longest_job_id():
    with pytest.raises(InvalidResultKey):
        fill("reports/{job_id}.csv", job_id="j" * 255)
