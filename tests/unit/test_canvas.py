"""Which canvases have tasks that come out of a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, chain, chord, group

from celery_outbox.record.canvas import is_lazy

app = Celery(set_as_current=False)


@app.task(name="add")
def add(*args: Any) -> None:
    """Stand for a task."""


def some() -> Any:
    return (add.s(number) for number in range(3))


@pytest.mark.parametrize(
    ("make", "lazy"),
    [
        (lambda: group(add.s(1), add.s(2)), False),
        (lambda: group([add.s(1), add.s(2)]), False),
        (lambda: group(some()), True),
        (lambda: group([add.s(1), group(some())]), True),
        (lambda: group([add.s(1), chord(some(), add.s())]), True),
        (lambda: group([add.s(1), chord([add.s(2)], add.s())]), False),
        (lambda: chord(some(), add.s()), True),
        (lambda: group([chain(add.s(1), group(some()))]), True),
        (lambda: group([add.s(1), add.s(tasks=iter(()))]), False),
        (lambda: group([dict(add.s(1))]), False),
    ],
)
def test_a_canvas_is_lazy_where_any_part_is(make: Callable[[], Any], lazy: bool):
    assert is_lazy(make()) is lazy
