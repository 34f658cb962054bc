"""How a chord that has failed is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import ChordError
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.execute.chord_places import Member, chord_option


def report(backend: Any, body: Any, error: ChordError) -> None:
    """Call the error callbacks of a chord, and store the error as its body's.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: the database did not take a callback in time.
    """
    try:
        raise error
    except ChordError:
        told = backend.chord_error_from_stack(body, error)
    # Celery stores what a callback raised in the error's place, and goes on.
    raised = getattr(told, "exception", None)
    if isinstance(raised, ExceptionWithTraceback):
        raised = raised.exc
    if isinstance(raised, SQLAlchemyError):
        raise raised


class Outer:
    """Stands for the request of a body that will not run, whose error callbacks were called."""

    def __init__(self, body: Any, member: Member, called: list[dict[str, Any]]) -> None:
        self.id = member.job_id
        self.called = called
        self.root_id = body.options.get("root_id")
        self.chord = chord_option(body, member.job_id)


def without_id(signature: Mapping[str, Any]) -> dict[str, Any]:
    """A callback as the application made it: its id is of one use."""
    options = {
        name: value
        for name, value in (signature.get("options") or {}).items()
        if name not in ("task_id", "reply_to")
    }
    return {**signature, "options": options}
