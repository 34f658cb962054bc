"""The tasks, named after their module."""

from __future__ import annotations

from tests.acceptance.shapes.proj.celery import app


@app.task
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


@app.task
def mul(x: int, y: int) -> int:
    """Multiply two numbers."""
    return x * y


@app.task
def xsum(numbers: list[int]) -> int:
    """Add numbers."""
    return sum(numbers)
