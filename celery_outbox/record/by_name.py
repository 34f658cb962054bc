"""``app.send_task``: calls by name are recorded, as calls of a task are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import celery.app.task
from celery import Celery
from celery.result import AsyncResult

from celery_outbox.record.capture import RecordingProducer
from celery_outbox.record.result import RecordedResult

#: What a message says of its result where the call by name said nothing: Celery 5.7 leaves it to
#: the task, which the worker knows, and earlier versions say that it is wanted.
_NOT_SAID = None if hasattr(celery.app.task, "get_actual_ignore_result") else False


@dataclass(frozen=True)
class ForeignTask:
    """Stands for a task that this app does not have."""

    name: str
    ignore_result: bool | None = _NOT_SAID
    serializer: str | None = None
    relayed: bool = True


class SendTask:
    """Takes the place of one app's ``send_task``.

    A call of a task with the outbox becomes a job, one of a task without it goes out as in
    Celery, and one of a task that the app does not have is recorded and relayed in full, where
    the whole app uses the outbox (``task_cls``).

    Arguments:
        app: the Celery app.
        own: what the app itself had set as its ``send_task``.
        outbox_of: gives the app's outbox.
        task_named: gives the app's task of a name, or ``None``.
    """

    def __init__(
        self,
        app: Celery,
        own: Callable[..., AsyncResult] | None,
        outbox_of: Callable[[Celery], Any],
        task_named: Callable[[str], Any],
    ) -> None:
        self._app = app
        self._own = own
        self._outbox_of = outbox_of
        self.task_named = task_named

    def __call__(self, *args: Any, session: Any = None, **options: Any) -> AsyncResult:
        """Send, or record, a task by name; everything that :meth:`celery.Celery.send_task` takes.

        Arguments:
            session: a SQLAlchemy Session or Connection whose transaction the call belongs to.

        Returns:
            A result whose ``id`` is the job id.

        Raises:
            celery_outbox.RecordError: the call cannot be recorded; nothing was written.
        """
        if isinstance(options.get("producer"), RecordingProducer):
            # On its way through Task.apply_async.
            return self._celerys(*args, **options)
        call = inspect.signature(Celery.send_task).bind(self._app, *args, **options).arguments
        call.pop("self")
        call.update(call.pop("options", {}))
        name, task = call.pop("name"), call.get("task_type")
        if task is None:
            task = self._find(name)
        if isinstance(task, ForeignTask) or hasattr(type(task), "outbox"):
            return self._record(name, task, session, **call)
        return self._celerys(name, **call)

    def _record(
        self,
        name: str,
        task: Any,
        session: Any,
        *,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        **options: Any,
    ) -> AsyncResult:
        for ignored in ("producer", "publisher"):
            options.pop(ignored, None)
        options.setdefault("ignore_result", _NOT_SAID)
        options.setdefault("result_cls", partial(RecordedResult, app=self._app))
        return self._outbox_of(self._app).record_call(
            task,
            partial(self._celerys, name),
            args,
            kwargs,
            task_id=task_id,
            session=session,
            options=options,
        )

    def _celerys(self, *args: Any, **options: Any) -> AsyncResult:
        if self._own is not None:
            return self._own(*args, **options)
        # Looked up for each call: what instruments Celery replaces it on the class.
        return type(self._app).send_task(self._app, *args, **options)

    def _find(self, name: Any) -> Any:
        app = self._app
        if not app.finalized and not app.autofinalize:
            # Celery sends what it cannot look up.
            return None
        task = self.task_named(name) if isinstance(name, str) else None
        if task is None and isinstance(name, str) and hasattr(app.Task, "outbox"):
            return ForeignTask(name)
        return task


def record_calls_by_name(
    app: Celery, outbox_of: Callable[[Celery], Any], task_named: Callable[[str], Any]
) -> None:
    """Make ``app.send_task`` record; for this app alone, and safe to repeat.

    Arguments:
        outbox_of: gives the app's outbox.
        task_named: gives the app's task of a name, or ``None``.
    """
    current = app.__dict__.get("send_task")
    if isinstance(current, SendTask):
        current.task_named = task_named
        return
    app.send_task = SendTask(app, current, outbox_of, task_named)
