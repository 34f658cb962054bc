"""The result of a recorded call: it meets the result backend when somebody asks it, not before."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult

_LATER = object()


class RecordedResult(AsyncResult):
    """An :class:`~celery.result.AsyncResult` that makes its backend when it is needed.

    Some backends open a connection when they are made, and a call must not wait for one.
    """

    _backend: Any

    def __init__(self, id: str, backend: Any = _LATER, **options: Any) -> None:
        super().__init__(id, backend=backend, **options)

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
