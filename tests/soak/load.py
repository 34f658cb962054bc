"""What the soak asks for: jobs of every kind, in transactions that commit or roll back."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from celery import chain, chord
from celery.canvas import Signature
from sqlalchemy.exc import SQLAlchemyError

CHILDREN = 3
#: Members of a chord's header, and steps of a chain.
MEMBERS = 3
#: In the id of a job that another job enqueues.
CHILD = "-child-"
#: In the id of a job that is a part of a canvas.
PART = "-part-"

#: Of a hundred requests; what they end as is in :data:`ENDS`.
MIX = {
    "short": 46,
    "pay": 10,
    "slow_pay": 4,
    "block": 8,
    "order": 3,
    "retry": 6,
    "insist": 4,
    "long": 1,
    "refuse": 3,
    "exhaust": 2,
    "poison": 1,
    "rolled_back": 6,
    "chain": 3,
    "chord": 3,
}

#: Reasons of jobs that are to end in quarantine; all others are to succeed. An attempt that
#: chaos ends is one of theirs, too, so the last one may be lost instead of failed.
ENDS = {
    "refuse": {"permanent", "lost_worker"},
    "exhaust": {"attempts_exhausted", "lost_worker"},
    "poison": {"lost_worker"},
}

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "short": (1,),
    "order": (CHILDREN,),
    "retry": (2,),
    "insist": (3,),
    "long": (8.0,),
    "slow_pay": (3.0,),
}


@dataclass(frozen=True)
class Request:
    """One request: the transaction that asks for a job, and what is to become of it."""

    job_id: str
    kind: str
    countdown: float | None

    @property
    def jobs(self) -> Iterator[tuple[str, str]]:
        """The ids and kinds of the jobs that are to exist."""
        if self.kind == "rolled_back":
            return
        if self.kind in CANVAS:
            for number in range(MEMBERS):
                yield part_of(self.job_id, number), "short"
            yield part_of(self.job_id, "end"), CANVAS[self.kind]
            return
        yield self.job_id, self.kind
        if self.kind == "order":
            for number in range(CHILDREN):
                yield child_of(self.job_id, number), "pay"


def plan(count: int, seed: int) -> list[Request]:
    """So many requests, always the same for a seed."""
    dice = random.Random(seed)
    kinds = dice.choices(list(MIX), weights=list(MIX.values()), k=count)
    return [
        Request(f"{kind}-{number}", kind, dice.choice([None] * 9 + [dice.uniform(0.5, 5.0)]))
        for number, kind in enumerate(kinds)
    ]


#: What the last job of each canvas is.
CANVAS = {"chain": "pay", "chord": "gather"}


def part_of(canvas_id: str, which: int | str) -> str:
    """The id of a job that is a part of a canvas."""
    return f"{canvas_id}{PART}{which}"


def canvas(shop: ModuleType, request: Request) -> Signature:
    """The signature that a request asks for, with an id for each of its jobs: asked for again,
    it finds them."""
    steps = [
        shop.short.si(number).set(task_id=part_of(request.job_id, number))
        for number in range(MEMBERS)
    ]
    if request.kind == "chain":
        return chain(*steps, shop.pay.si().set(task_id=part_of(request.job_id, "end")))
    return chord(steps, shop.gather.s().set(task_id=part_of(request.job_id, "end")))


def child_of(job_id: str, number: int) -> str:
    """The id of a job that another job enqueues."""
    return f"{job_id}{CHILD}{number}"


class Load(threading.Thread):
    """Records the requests, spread over the time that there is.

    :param shop: the app's module.
    :param seconds: for all of them.
    """

    def __init__(self, shop: ModuleType, requests: list[Request], seconds: float) -> None:
        super().__init__(name="load", daemon=True)
        self._shop = shop
        self._requests = requests
        self._seconds = seconds
        self.recorded = 0
        self.repeated = 0

    def run(self) -> None:
        """Record one after the other; as often as it takes, as a client of a web site would."""
        started = time.monotonic()
        for number, request in enumerate(self._requests):
            ahead = started + self._seconds * number / len(self._requests) - time.monotonic()
            if ahead > 0:
                threading.Event().wait(ahead)
            while not self._record(request):
                self.repeated += 1
                threading.Event().wait(0.2)
            self.recorded += 1

    def _record(self, request: Request) -> bool:
        """Whether the transaction is known to have ended as it should."""
        kind = "short" if request.kind == "rolled_back" else request.kind
        options = {"task_id": request.job_id, "countdown": request.countdown}
        try:
            engine = self._shop.outbox.engine
            if request.kind in CANVAS:
                with engine.begin() as connection, self._shop.outbox.use(connection):
                    canvas(self._shop, request).apply_async(countdown=request.countdown)
                return True
            task = getattr(self._shop, kind)
            with engine.connect() as connection, connection.begin() as transaction:
                task.apply_async(ARGUMENTS.get(kind, ()), session=connection, **options)
                if request.kind == "rolled_back":
                    transaction.rollback()
            return True
        except SQLAlchemyError:
            # Whether it was committed is not known; the id makes the next try harmless.
            return False
