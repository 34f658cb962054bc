"""Objects that live in a process of their own, so that no contender carries another's imports."""

from __future__ import annotations

import contextlib
import signal
import traceback
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


class ChildError(Exception):
    """The other process could not do what it was asked for, or did not answer in time."""


class Child:
    """A process that makes one object and calls its methods, one at a time.

    It ends when this object is closed, and by itself when this process is gone.

    Arguments:
        kind: ``"module:Class"``.
        arguments: of the class; anything that can be pickled.
    """

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind = kind
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, kind, arguments), name=kind, daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._answer(60.0)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any, timeout: float = 300.0) -> Any:
        """Call a method there and return what it returns.

        Arguments:
            timeout: in seconds.

        Raises:
            ChildError: it raised an error, or did not return in time; in that case the process
                is gone.
        """
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise ChildError(f"{self.kind} is gone") from error
        return self._answer(timeout)

    def close(self) -> None:
        """End the process. Harmless when repeated."""
        self._pipe.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)

    def _answer(self, timeout: float) -> Any:
        try:
            if not self._pipe.poll(timeout):
                self._process.kill()
                raise ChildError(f"{self.kind} did not answer within {timeout:g} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildError(f"{self.kind} ended") from error
        if not good:
            raise ChildError(value)
        return value


def _serve(pipe: Connection, kind: str, arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole group; the parent ends this process in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = kind.partition(":")
    with contextlib.suppress(EOFError, OSError):
        try:
            served = getattr(import_module(module), name)(*arguments)
        except Exception:
            pipe.send((False, traceback.format_exc()))
            return
        pipe.send((True, None))
        while True:
            method, values = pipe.recv()
            try:
                pipe.send((True, getattr(served, method)(*values)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
