"""The web processes that record jobs, one for each contender."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks import peers
from benchmarks.child import Child, ChildError
from benchmarks.contest import Contender, Say
from benchmarks.results import PEER, Section
from benchmarks.stage import Stage

#: The class of each peer's web process.
PEERS = {
    "django-celery-outbox": "benchmarks.peers.django_outbox:Caller",
    "procrastinate": "benchmarks.peers.procrastinate_peer:Caller",
    "pgqueuer": "benchmarks.peers.pgqueuer_peer:Caller",
}

CONFIRMED = "confirmed .delay()"
UNCONFIRMED = "unconfirmed .delay()"
BARE = "inserts alone"
OURS = "celery-outbox"


class Callers:
    """The processes of a section; a contender whose process cannot be started is left out."""

    def __init__(self, stage: Stage, stack: ExitStack, section: Section, say: Say) -> None:
        self._stage = stage
        self._stack = stack
        self._section = section
        self._say = say
        self._children: dict[str, Child] = {}

    def open(self, name: str, kind: str, *arguments: object) -> None:
        """Start one, in a place of its own."""
        place = self._stack.enter_context(self._stage.place())
        try:
            self._children[name] = self._stack.enter_context(
                self._stage.child(kind, place, *arguments)
            )
        except ChildError as error:
            self._section.notes.append(f"{name} could not be started: {_last_line(error)}")
            self._say(f"{name} could not be started:\n{error}")

    def open_peers(self) -> None:
        """Start those that are installed."""
        for name, kind in PEERS.items():
            if peers.is_installed(name):
                self.open(name, kind)
            else:
                self._section.notes.append(f"{name} is not installed")

    def call(self, name: str, method: str, *arguments: object) -> Any:
        """Ask one of them."""
        return self._children[name].call(method, *arguments)

    def has(self, name: str) -> bool:
        """Whether it runs."""
        return name in self._children

    def contender(
        self, name: str, role: str, does: str, method: str, count: int, *, of: str, unit: str
    ) -> list[Contender]:
        """One that is measured by ``method(count)``, which returns seconds; none, if it does not
        run.

        Arguments:
            of: the process.
        """
        if of not in self._children:
            return []
        child = self._children[of]

        def run() -> float:
            seconds: float = child.call(method, count)
            child.call("clean")
            return count / seconds

        return [Contender(name, role, does, run, unit)]

    def peer(self, name: str, does: str, method: str, count: int, unit: str) -> list[Contender]:
        """The same for a peer."""
        return self.contender(name, PEER, does, method, count, of=name, unit=unit)


@contextmanager
def open_callers(stage: Stage, section: Section, say: Say) -> Iterator[Callers]:
    """Processes that end, and whose places go, with the block."""
    with ExitStack() as stack:
        yield Callers(stage, stack, section, say)


def open_all(callers: Callers) -> None:
    """The contenders of all sections that record."""
    callers.open(CONFIRMED, "benchmarks.peers.stock:Caller", True)
    callers.open(UNCONFIRMED, "benchmarks.peers.stock:Caller", False)
    callers.open(OURS, "benchmarks.peers.ours:Caller")
    callers.open_peers()
    callers.open(BARE, "benchmarks.peers.bare:Caller")


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
