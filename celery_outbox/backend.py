"""The result backend of an app with an outbox: chords are synchronized by the database, and the
backend itself is made when somebody asks for a result, not before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from celery import Celery, states
from celery.backends.base import DisabledBackend
from celery.local import Proxy
from celery.result import ResultSet

from celery_outbox.context import reporting
from celery_outbox.record.result import RecordedResult

if TYPE_CHECKING:
    from celery_outbox.app import Outbox


def install(app: Celery, outbox: Callable[[], Outbox]) -> None:
    """Let the backends of an app leave its chords to the outbox; safe to repeat."""
    make = app._get_backend
    if isinstance(getattr(make, "__self__", None), _Maker):
        return
    app._get_backend = _Maker(make, outbox, app).make
    made = app._backend
    if made is not None:
        # For the thread that asked before there was an outbox.
        app._backend = _Maker(lambda: made, outbox, app).make()


class _Maker:
    def __init__(self, stock: Callable[[], Any], outbox: Callable[[], Outbox], app: Celery) -> None:
        self._stock = stock
        self._outbox = outbox
        self._app = app

    def make(self) -> Any:
        thread_safe = bool(self._app.conf.get("result_backend_thread_safe", False))
        return LazyBackend(
            _Once(self._stock, self._outbox), _chord_hooks(self._outbox), thread_safe
        )


class _Once:
    """Makes a backend at the first call."""

    def __init__(self, stock: Callable[[], Any], outbox: Callable[[], Outbox]) -> None:
        self._stock = stock
        self._outbox = outbox
        self._made: Any = None
        self._lock = threading.RLock()

    def __call__(self) -> Any:
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = _adapt(self._stock(), self._outbox)
        return self._made


class LazyBackend(Proxy):
    """Stands for a result backend, and answers what a call asks without one.

    Some backends open a connection when they are made, and a call must not wait for one.
    """

    __slots__ = ("_hooks", "_thread_safe")

    def __init__(
        self, backend: Callable[[], Any], hooks: dict[str, Callable[..., None]], thread_safe: bool
    ) -> None:
        super().__init__(backend)
        object.__setattr__(self, "_hooks", hooks)
        object.__setattr__(self, "_thread_safe", thread_safe)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        hook = self._hooks.get(name)
        return super().__getattr__(name) if hook is None else hook

    @property
    def thread_safe(self) -> bool:
        """Whether threads share it; Celery asks when it keeps it."""
        return bool(self._thread_safe)


def _chord_hooks(outbox: Callable[[], Outbox]) -> dict[str, Callable[..., None]]:
    """What a call does with a backend about chords, by the name of the backend's method."""
    return {
        # They are, with any backend and with none.
        "ensure_chords_allowed": lambda: None,
        "apply_chord": lambda header, body, **_: outbox().chord_recorder.begin(header, body),
        "set_chord_size": lambda chord_id, size: outbox().chord_recorder.set_size(chord_id, size),
        "add_to_chord": lambda chord_id, job: outbox().chord_recorder.add(chord_id, job.id),
    }


def _adapt(backend: Any, outbox: Callable[[], Outbox]) -> Any:
    """Replace, in a backend that was made, what it does about chords."""
    stock_return = backend.on_chord_part_return

    def on_chord_part_return(request: Any, state: str, result: Any, **options: Any) -> Any:
        if not outbox().chords.part_returned(backend, request, state, result):
            # It was called by a process without the outbox.
            return stock_return(request, state, result, **options)
        return None

    backend.on_chord_part_return = on_chord_part_return
    for name, hook in _chord_hooks(outbox).items():
        setattr(backend, name, hook)
    for name in ("mark_as_failure", "mark_as_revoked", "chord_error_from_stack"):
        setattr(backend, name, _reporting(getattr(backend, name)))
    if hasattr(backend, "iter_native"):
        backend.iter_native = _after_subscribing(backend.iter_native)
    if isinstance(backend, DisabledBackend) and hasattr(backend, "_fail_chain"):
        backend._fail_chain = _without_states(backend, backend._fail_chain)
    return backend


def _reporting(tell: Callable[..., Any]) -> Callable[..., Any]:
    """What it calls are callbacks, whoever tells of the end: Celery's worker does so for tasks
    without the outbox."""

    def report(*args: Any, **options: Any) -> Any:
        ended = args[0] if args else options.get("task_id", options.get("callback"))
        with reporting(str(getattr(ended, "id", ended))):
            return tell(*args, **options)

    return report


def _after_subscribing(iter_native: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(result: Any, *args: Any, **options: Any) -> Any:
        _subscribe(result)
        return iter_native(result, *args, **options)

    return iterate


def _subscribe(result: Any) -> None:
    """Wait for the members of a group: since their call nobody has."""
    for each in result.results or ():
        if isinstance(each, RecordedResult):
            each.subscribe()
        elif isinstance(each, ResultSet):
            _subscribe(each)


def _without_states(backend: Any, fail_chain: Callable[..., None]) -> Callable[..., None]:
    """Celery 5.7 asks for the states of steps that failed, which no backend keeps here."""

    @contextmanager
    def nothing_is_known() -> Iterator[None]:
        backend.get_state = lambda task_id: states.PENDING
        try:
            yield
        finally:
            backend.__dict__.pop("get_state", None)

    def fail(*args: Any, **options: Any) -> None:
        with nothing_is_known():
            fail_chain(*args, **options)

    return fail
