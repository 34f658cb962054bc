"""The states of a job and the one table of transitions between them.

The SQL guards, the CHECK constraint on ``outbox_job.state`` and the diagram in the
documentation are built from this table or tested against it.
"""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """Where a job stands."""

    #: Recorded, and waiting for a worker (or for the dispatcher before that).
    QUEUED = "queued"
    #: A worker holds it under a lease.
    RUNNING = "running"
    #: An attempt ended without success; the next one is due at ``available_at``.
    RETRYING = "retrying"
    #: Its body went on as other jobs (``self.replace``), the last of which will have its id.
    REPLACED = "replaced"
    #: Its result is stored.
    SUCCEEDED = "succeeded"
    #: It waits for a person; ``reason`` says why.
    QUARANTINED = "quarantined"
    #: Somebody took it back before it ran, or gave it up in quarantine.
    CANCELLED = "cancelled"
    #: ``expires_at`` passed before it ran.
    EXPIRED = "expired"
    #: Published in full to another service, which owns what follows.
    RELAYED = "relayed"

    def __str__(self) -> str:
        return self.value


class Transition(str, Enum):
    """What can happen to a job; the value is the name of the journal line."""

    #: A caller asked for the operation.
    RECORD = "recorded"
    #: A worker met a message without a claim check: of a client that has no outbox, or of a
    #: call that was relayed and whose task turned out to be ours.
    ADOPT = "adopted"
    #: A worker took the job under a lease.
    CLAIM = "claimed"
    #: The attempt ended with a stored result.
    SUCCEED = "succeeded"
    #: The attempt ended; another one follows.
    RETRY = "retrying"
    #: The body went on as a chain, group or chord whose last step has the job's id.
    REPLACE = "replaced"
    #: That last step was recorded.
    CONTINUE = "continued"
    #: No attempt will follow before a person decides.
    QUARANTINE = "quarantined"
    #: The lease of a silent worker ended; another attempt follows.
    RESCUE = "rescued"
    #: A person sent a quarantined job back to the queue.
    REPLAY = "replayed"
    #: A person recorded that a quarantined job has in fact succeeded.
    RESOLVE = "resolved"
    #: A person gave a quarantined job up.
    DISCARD = "discarded"
    #: A caller took a job back before it ran.
    CANCEL = "cancelled"
    #: Nobody ran the job before its ``expires_at``.
    EXPIRE = "expired"
    #: The broker confirmed a message for another service.
    RELAY = "relayed"

    def __str__(self) -> str:
        return self.value


_WAITING = frozenset({State.QUEUED, State.RETRYING})

#: Every permitted step: transition -> (states it may start from, state it ends in).
#: ``None`` as a source stands for "no such job yet".
TRANSITIONS: dict[Transition, tuple[frozenset[State | None], State]] = {
    Transition.RECORD: (frozenset({None}), State.QUEUED),
    # From RELAYED: the caller's process did not know the task, and a worker of ours does.
    Transition.ADOPT: (frozenset({None, State.RELAYED}), State.QUEUED),
    # From RUNNING only when the lease has expired: the SQL guard adds that condition.
    Transition.CLAIM: (_WAITING | {State.RUNNING}, State.RUNNING),
    Transition.SUCCEED: (frozenset({State.RUNNING}), State.SUCCEEDED),
    Transition.RETRY: (frozenset({State.RUNNING}), State.RETRYING),
    Transition.REPLACE: (frozenset({State.RUNNING}), State.REPLACED),
    Transition.CONTINUE: (frozenset({State.REPLACED}), State.QUEUED),
    # From None: a message without a job; from waiting states: the broker refused the message.
    # From RELAYED: a worker of ours met the message, and cannot run it.
    Transition.QUARANTINE: (
        _WAITING | {State.RUNNING, State.RELAYED, None},
        State.QUARANTINED,
    ),
    Transition.RESCUE: (frozenset({State.RUNNING}), State.RETRYING),
    Transition.REPLAY: (frozenset({State.QUARANTINED}), State.QUEUED),
    Transition.RESOLVE: (frozenset({State.QUARANTINED}), State.SUCCEEDED),
    Transition.DISCARD: (frozenset({State.QUARANTINED}), State.CANCELLED),
    Transition.CANCEL: (_WAITING | {State.REPLACED}, State.CANCELLED),
    Transition.EXPIRE: (_WAITING, State.EXPIRED),
    # From RETRYING: a body went on as a task of another service (self.replace()).
    Transition.RELAY: (_WAITING, State.RELAYED),
}

#: States that no worker, dispatcher or maintenance run leaves by itself. A relayed job is left
#: alone too, unless the message that went out for it comes back to a worker of ours.
FINAL_STATES = frozenset(
    {State.SUCCEEDED, State.QUARANTINED, State.CANCELLED, State.EXPIRED, State.RELAYED}
)

#: States in which a job waits for a worker.
WAITING_STATES = _WAITING


def sources(transition: Transition) -> frozenset[State]:
    """The existing states from which ``transition`` may start."""
    allowed, _ = TRANSITIONS[transition]
    return frozenset(state for state in allowed if state is not None)


def target(transition: Transition) -> State:
    """The state in which ``transition`` ends."""
    return TRANSITIONS[transition][1]
