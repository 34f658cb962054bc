"""Tasks of canvases: chains, groups, chords and replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import chain, chord, group

from celery_outbox import PermanentError


def register(task: Callable[..., Any], note_run: Callable[..., None]) -> None:
    """Add them to the app of the acceptance tests."""

    @task(name="canvas.add")
    def add(self: Any, *numbers: Any) -> Any:
        note_run(self.request.id)
        return sum(numbers)

    @task(name="canvas.total")
    def total(self: Any, numbers: Any) -> Any:
        note_run(self.request.id, "body")
        return sum(sum(each) if isinstance(each, list) else each for each in numbers)

    @task(name="canvas.listed")
    def listed(self: Any, values: Any) -> Any:
        note_run(self.request.id, "body")
        return values

    @task(name="canvas.refuse")
    def refuse(self: Any, *args: Any) -> None:
        note_run(self.request.id)
        raise PermanentError("no")

    @task(name="canvas.note")
    def note(self: Any, *args: Any) -> None:
        note_run(self.request.id, f"note {args[0]}")

    @task(name="canvas.become")
    def become(self: Any, what: str, number: int) -> Any:
        note_run(self.request.id, what)
        steps = {
            "task": lambda: add.s(number, 1),
            "chain": lambda: chain(add.s(number, 1), add.s(2), add.s(3)),
            "group": lambda: group(add.s(number, 1), add.s(number, 2)),
            "chord": lambda: chord([add.s(number, 1), add.s(number, 2)], total.s()),
            "chain of chord": lambda: chain(add.s(number, 1), group(add.s(1), add.s(2)), total.s()),
            "chain of group": lambda: chain(add.s(number, 1), group(add.s(1), add.s(2))),
            "twice": lambda: chain(add.s(number, 1), become.si("chain", number)),
            "failing": lambda: chain(add.s(number, 1), refuse.s(), add.s(3)),
        }
        return self.replace(steps[what]())

    @task(name="canvas.grow")
    def grow(self: Any, number: int) -> int:
        note_run(self.request.id)
        self.add_to_chord(add.s(number, 100))
        return number
