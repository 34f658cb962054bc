"""Waiting until a server that was started answers."""

from __future__ import annotations

from collections.abc import Callable

from tests.processes import ProcessGroup
from tests.wait import eventually


def wait_until_ready(
    name: str, process: ProcessGroup, answers: Callable[[], bool], *, deadline: float = 60.0
) -> None:
    """Wait until ``answers`` returns True; end a server that does not come to that.

    :param name: the server's name, for the message.
    :param deadline: in seconds.
    :raises AssertionError: the server ended, or did not answer in time; the message has its log.
    """

    def ready() -> bool:
        return not process.alive or answers()

    def failure() -> str:
        return f"{name} did not start; its log:\n{process.tail()}\n"

    try:
        eventually(ready, deadline=deadline, message=failure)
        assert process.alive, failure()
    except AssertionError:
        process.kill()
        raise
