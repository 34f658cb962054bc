"""The table of the crash matrix: who dies where, and what must hold after it.

One more boundary is one more row here. What is found at the moment of death is not written down
here: the tests observe it, and ``docs/crash-matrix.rst`` shows what they observed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from celery_outbox.core.states import State
from tests.acceptance.crash import deaths
from tests.acceptance.crash.bench import JOB, NEIGHBOURS
from tests.acceptance.crash.deaths import Death


class Stage(str, Enum):
    """Which part of the product dies; the value is its title on the page."""

    RECORD = "The process that records"
    DISPATCH = "The dispatcher"
    WORKER = "The worker"
    POOL = "A process of the worker's pool, and the main process"
    MAINTENANCE = "Maintenance"

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Scenario:
    """One row.

    Attributes:
        name: names the row, in tests' messages and table names.
        here: the boundary, in words.
        death: brings it about.
        then: what happens after the death, in words.
        attempts: of the job, in the end.
        runs: how often its body is entered, over all attempts.
        end: the job's state in the end.
        copies: messages in the quarantine queue in the end.
        asks_again: the caller does not know whether it was recorded, and asks again.
        jobs: all that must have ended like the job.
        transactional: the effect is a row, committed together with the success.
        settings: of the app.
    """

    name: str
    stage: Stage
    here: str
    death: Death
    then: str
    attempts: int
    runs: int
    end: State = State.SUCCEEDED
    copies: int = 0
    asks_again: bool = False
    jobs: tuple[str, ...] = (JOB,)
    transactional: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


#: What several rows say.
_RESCUED = "The lease ends, maintenance takes the job back, and another attempt runs it."
_AGAIN = "The dispatcher's hold on the row ends, and another dispatcher publishes it."
_TWICE = (
    "Another dispatcher publishes the row again. Two deliveries: one runs, the other is answered"
    " from the stored result."
)
_DUPLICATE = "The broker delivers the message again; the stored result answers it, and the body"
_RESCUED_LAST = (
    "It was the only attempt: maintenance, or the worker that gets the message again, quarantines"
    " the job as lost."
)

SCENARIOS = (
    Scenario(
        "record-before-commit",
        Stage.RECORD,
        "The job is written, and not committed.",
        deaths.recording("record.before_commit", "record_within"),
        "The database rolls it back. The caller asks again with the same id, and that is the first"
        " call.",
        attempts=1,
        runs=1,
        asks_again=True,
    ),
    Scenario(
        "record-after-commit",
        Stage.RECORD,
        "The job is committed, and the caller does not know.",
        deaths.recording("record.after_commit"),
        "It runs. The caller asks again with the same id, and finds the first job.",
        attempts=1,
        runs=1,
        asks_again=True,
    ),
    Scenario(
        "dispatch-after-claim",
        Stage.DISPATCH,
        "It has claimed the row.",
        deaths.dispatching("dispatch.after_claim"),
        _AGAIN,
        attempts=1,
        runs=1,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "dispatch-before-publish",
        Stage.DISPATCH,
        "The message is built, and not sent.",
        deaths.dispatching("dispatch.before_publish"),
        _AGAIN,
        attempts=1,
        runs=1,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "dispatch-mid-batch",
        Stage.DISPATCH,
        "In a batch of three: one is confirmed, two are not sent.",
        deaths.dispatching("dispatch.mid_batch", in_batch=True),
        "Another dispatcher publishes all three, the first for the second time. Each runs once.",
        attempts=1,
        runs=1,
        jobs=(JOB, *NEIGHBOURS),
        settings=deaths.ONE_BY_ONE,
    ),
    Scenario(
        "dispatch-before-confirm",
        Stage.DISPATCH,
        "The broker has the message, and the confirm is not read.",
        deaths.dispatching("dispatch.before_confirm"),
        _TWICE,
        attempts=1,
        runs=1,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "dispatch-before-mark",
        Stage.DISPATCH,
        "The confirm is read, and the row is not marked.",
        deaths.dispatching("dispatch.before_mark"),
        _TWICE,
        attempts=1,
        runs=1,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "dispatch-after-mark",
        Stage.DISPATCH,
        "The row is marked.",
        deaths.dispatching("dispatch.after_mark"),
        "A worker gets the message.",
        attempts=1,
        runs=1,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "dispatch-copy-before-mark",
        Stage.DISPATCH,
        "The broker has the copy of a failed job for the quarantine queue (of a queue that does not"
        " dead-letter), and the row is not marked.",
        deaths.copying("dispatch.before_mark"),
        "Another dispatcher sends the copy again: two messages in the quarantine queue. Delivery is"
        " at least once there, too; ``quarantine list`` shows one job.",
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=2,
        settings=deaths.SHORT_HOLD,
    ),
    Scenario(
        "worker-on-delivery",
        Stage.WORKER,
        "It got the message, and has not claimed the job.",
        deaths.working("execute.on_delivery"),
        "The broker delivers the message again. No attempt was lost.",
        attempts=1,
        runs=1,
    ),
    Scenario(
        "worker-after-claim",
        Stage.WORKER,
        "It has claimed the job, and the body has not begun.",
        deaths.working("execute.after_claim"),
        _RESCUED,
        attempts=2,
        runs=1,
    ),
    Scenario(
        "worker-in-body",
        Stage.WORKER,
        "In the body, before its effect.",
        deaths.working("execute.in_body"),
        _RESCUED,
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-after-effect",
        Stage.WORKER,
        "In the body, after its effect on another side, before the result.",
        deaths.working("execute.after_effect"),
        _RESCUED + " The body makes the effect again; the other side knows the idempotency key.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-before-commit",
        Stage.WORKER,
        "A transactional body is over: its rows and its success are written, and not committed.",
        deaths.working("execute.before_commit", "book"),
        "The database rolls all of it back. " + _RESCUED,
        attempts=2,
        runs=2,
        transactional=True,
    ),
    Scenario(
        "worker-after-commit",
        Stage.WORKER,
        "A transactional body is over: its rows and its success are committed.",
        deaths.working("execute.after_commit", "book"),
        _DUPLICATE + " does not run.",
        attempts=1,
        runs=1,
        transactional=True,
    ),
    Scenario(
        "worker-before-settle",
        Stage.WORKER,
        "The result is in the result store, and the job does not say so.",
        deaths.working("execute.before_settle"),
        "The lease ends and maintenance takes the job back. The next attempt finds the result, and"
        " does not run the body.",
        attempts=2,
        runs=1,
    ),
    Scenario(
        "worker-after-settle",
        Stage.WORKER,
        "The success is committed, and the message is not acknowledged.",
        deaths.working("execute.after_settle"),
        _DUPLICATE + " does not run.",
        attempts=1,
        runs=1,
    ),
    Scenario(
        "worker-before-retry",
        Stage.WORKER,
        "The body has failed, and the retry is not committed.",
        deaths.working("execute.before_settle", "stumble"),
        _RESCUED,
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-after-retry",
        Stage.WORKER,
        "The retry is committed, and the message is not acknowledged.",
        deaths.working("execute.after_settle", "stumble"),
        "The row of the next attempt is published. Whichever message comes first runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-before-own-retry",
        Stage.WORKER,
        "The body has called ``self.retry()``, and that is not committed.",
        deaths.working("execute.before_settle", "come_back"),
        _RESCUED,
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-after-own-retry",
        Stage.WORKER,
        "The body has called ``self.retry()``, that is committed, and the message is not"
        " acknowledged.",
        deaths.working("execute.after_settle", "come_back"),
        "The row of the next attempt is published. Whichever message comes first runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "worker-before-quarantine",
        Stage.WORKER,
        "The body has failed for good, and that is not committed.",
        deaths.working("execute.before_settle", "refuse"),
        _RESCUED + " It fails again, and is quarantined.",
        attempts=2,
        runs=2,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "worker-before-reject",
        Stage.WORKER,
        "The quarantine is committed, and the message is not rejected.",
        deaths.working("execute.after_settle", "refuse"),
        "The broker delivers the message again, and it is rejected into the quarantine queue. On"
        " Redis the outbox sends the copy, and the message is acknowledged.",
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "child-on-delivery",
        Stage.POOL,
        "A process of the pool, before it has claimed the job. The main process counts the attempt"
        " and settles.",
        deaths.child("execute.on_delivery"),
        "Another attempt runs it.",
        attempts=2,
        runs=1,
    ),
    Scenario(
        "child-in-body",
        Stage.POOL,
        "A process of the pool, in the body. The main process settles.",
        deaths.child("execute.in_body"),
        "Another attempt runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "child-before-settle",
        Stage.POOL,
        "A process of the pool, with the result in the result store. The main process settles.",
        deaths.child("execute.before_settle"),
        "Another attempt finds the result, and does not run the body.",
        attempts=2,
        runs=1,
    ),
    Scenario(
        "child-after-settle",
        Stage.POOL,
        "A process of the pool, after the success is committed. The main process gives the message"
        " back once, so that callbacks go out.",
        deaths.child("execute.after_settle", deliveries=2),
        _DUPLICATE + " does not run.",
        attempts=1,
        runs=1,
    ),
    Scenario(
        "every-child-in-body",
        Stage.POOL,
        "Each process of the pool that runs the body. The main process settles each time.",
        deaths.every_child("execute.in_body"),
        "After the last permitted attempt it is quarantined as ``lost_worker``.",
        attempts=3,
        runs=3,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "main-before-settle",
        Stage.POOL,
        "A process of the pool, in the body; then the main process, before it settles for it.",
        deaths.main_process("main.before_settle"),
        _RESCUED,
        attempts=2,
        runs=2,
    ),
    Scenario(
        "main-after-settle",
        Stage.POOL,
        "A process of the pool, in the body; then the main process, after it has settled, before it"
        " acknowledges.",
        deaths.main_process("main.after_settle"),
        "The row of the next attempt is published. Whichever message comes first runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "main-before-last-settle",
        Stage.POOL,
        "A process of the pool, in the only attempt; then the main process, before it settles.",
        deaths.main_process("main.before_settle", task="last"),
        _RESCUED_LAST,
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "main-before-reject",
        Stage.POOL,
        "A process of the pool, in the only attempt; then the main process, after it has"
        " quarantined the job, before it rejects the message.",
        deaths.main_process("main.after_settle", task="last"),
        "The broker delivers the message again, and it is rejected into the quarantine queue. On"
        " Redis the outbox sends the copy, and the message is acknowledged.",
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "main-after-success",
        Stage.POOL,
        "A process of the pool, after the success is committed; then the main process, before it"
        " gives the message back.",
        deaths.main_process("main.after_settle", of_child="execute.after_settle"),
        _DUPLICATE + " does not run.",
        attempts=1,
        runs=1,
    ),
    Scenario(
        "main-before-time-limit",
        Stage.POOL,
        "The main process at a hard time limit, before it settles.",
        deaths.time_limit("main.before_settle"),
        _RESCUED,
        attempts=2,
        runs=2,
    ),
    Scenario(
        "main-after-time-limit",
        Stage.POOL,
        "The main process at a hard time limit, after it has settled, before it acknowledges.",
        deaths.time_limit("main.after_settle"),
        "The row of the next attempt is published. Whichever message comes first runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "maintain-in-rescue",
        Stage.MAINTENANCE,
        "It takes back a job whose lease has ended, and has not committed.",
        deaths.rescuing("maintain.in_rescue"),
        "The next maintenance takes it back, and another attempt runs it.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "maintain-after-rescue",
        Stage.MAINTENANCE,
        "It has taken back a job whose lease has ended.",
        deaths.rescuing("maintain.after_rescue"),
        "The row of the next attempt is published.",
        attempts=2,
        runs=2,
    ),
    Scenario(
        "maintain-in-last-rescue",
        Stage.MAINTENANCE,
        "It quarantines a job whose last attempt was lost, and has not committed.",
        deaths.rescuing("maintain.in_rescue", "last"),
        _RESCUED_LAST,
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "maintain-after-last-rescue",
        Stage.MAINTENANCE,
        "It has quarantined a job whose last attempt was lost.",
        deaths.rescuing("maintain.after_rescue", "last"),
        "The outbox sends the copy; the message that the broker delivers again is acknowledged.",
        attempts=1,
        runs=1,
        end=State.QUARANTINED,
        copies=1,
    ),
    Scenario(
        "maintain-in-expire",
        Stage.MAINTENANCE,
        "It ends a job whose time is over, and has not committed.",
        deaths.expiring("maintain.in_expire"),
        "The next maintenance, or the dispatcher, ends it.",
        attempts=0,
        runs=0,
        end=State.EXPIRED,
    ),
    Scenario(
        "maintain-after-expire",
        Stage.MAINTENANCE,
        "It has ended a job whose time is over.",
        deaths.expiring("maintain.after_expire"),
        "Nothing is left to do.",
        attempts=0,
        runs=0,
        end=State.EXPIRED,
    ),
    Scenario(
        "maintain-in-republish",
        Stage.MAINTENANCE,
        "The broker has lost a message; maintenance publishes it again, and has not committed.",
        deaths.republishing("maintain.in_republish"),
        "The next maintenance does it.",
        attempts=1,
        runs=1,
        settings=deaths.SOON_LOST,
    ),
    Scenario(
        "maintain-after-republish",
        Stage.MAINTENANCE,
        "The broker has lost a message, and the row that publishes it again is committed.",
        deaths.republishing("maintain.after_republish"),
        "A dispatcher publishes it.",
        attempts=1,
        runs=1,
        settings=deaths.SOON_LOST,
    ),
)


def of(stage: Stage) -> list[Scenario]:
    """The rows of a stage."""
    return [scenario for scenario in SCENARIOS if scenario.stage is stage]
