"""The result of a recorded call: it meets the result backend when somebody asks it, not before."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult
from vine import barrier

_LATER = object()


class RecordedResult(AsyncResult):
    """An :class:`~celery.result.AsyncResult` that makes its backend when it is needed.

    Some backends open a connection when they are made, and a call must not wait for one.
    """

    _backend: Any
    _subscribes_later = False

    def __init__(self, id: str, backend: Any = _LATER, **options: Any) -> None:
        super().__init__(id, backend=backend, **options)

    def then(self, callback: Any, on_error: Any = None, weak: bool = False) -> Any:
        """Call ``callback`` when the result is there.

        The barrier of a group is one that nobody waits for yet: the backend, which would open a
        connection, hears of it when the group's result is asked for.
        """
        if isinstance(callback, barrier):
            self._subscribes_later = True
            return self.on_ready.then(callback, on_error)
        return super().then(callback, on_error, weak=weak)

    def subscribe(self) -> None:
        """Let the backend wait for this result, if a group has left that for later."""
        if self._subscribes_later:
            self._subscribes_later = False
            self.backend.add_pending_result(self, weak=True)

    def __del__(self) -> None:
        # AsyncResult's asks the backend, which would be made for nothing but this.
        if self.__dict__.get("_backend", _LATER) is not _LATER:
            super().__del__()

    @property
    def backend(self) -> Any:
        """The result backend of the app."""
        if self._backend is _LATER:
            self._backend = self.app.backend
        return self._backend

    @backend.setter
    def backend(self, backend: Any) -> None:
        self._backend = backend
