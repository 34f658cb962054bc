"""Runs a dispatcher so that a signal ends it, whatever it waits for."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from celery_outbox.dispatch.dispatcher import Dispatcher
from celery_outbox.exceptions import DispatcherStuck
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox.operate")

#: Seconds between two looks at whether a signal has come.
INTERVAL = 0.2


def until_signalled(dispatcher: Dispatcher, work: Callable[[], Any], *, grace: float) -> Any:
    """Run ``work`` of a dispatcher; SIGTERM and Ctrl-C end it after the batch in flight.

    It runs in a thread of its own: Python's signal handlers wait for the main thread, and a
    database driver that waits for its server would hold that for as long.

    Arguments:
        work: :meth:`Dispatcher.run` or :meth:`Dispatcher.drain`.
        grace: seconds after the first signal for the batch in flight; a second signal ends
            the wait at once.

    Returns:
        What ``work`` returns.

    Raises:
        DispatcherStuck: the batch in flight did not end in time.
        Exception: what ``work`` raises.
    """
    done: list[Any] = []
    errors: list[BaseException] = []
    signalled, impatient = threading.Event(), threading.Event()

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:
            errors.append(error)

    def stop(number: int, frame: FrameType | None) -> None:
        if signalled.is_set():
            impatient.set()
        signalled.set()
        dispatcher.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    # A daemon thread: one that is stuck must not keep the process.
    thread = threading.Thread(target=run, name="outbox-dispatcher", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not signalled.is_set():
            thread.join(INTERVAL)
        left = grace
        while thread.is_alive() and left > 0 and not impatient.is_set():
            thread.join(INTERVAL)
            left -= INTERVAL
    finally:
        for number, handler in before.items():
            # ``None``: what was not set from Python cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    # Not asked whether the thread lives: it may end between two questions.
    if errors:
        raise errors[0]
    if done:
        return done[0]
    log_event(logger, logging.ERROR, "outbox.dispatcher_stuck", dispatcher=dispatcher.name)
    raise DispatcherStuck(dispatcher=dispatcher.name)
