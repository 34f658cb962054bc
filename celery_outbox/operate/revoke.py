"""``app.control.revoke``: a job that waits is cancelled in the database, whoever is up."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import Celery
from celery.app.control import Control as CeleryControl
from celery.app.task import Context
from celery.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name
from sqlalchemy.exc import SQLAlchemyError

from celery_outbox.context import reporting
from celery_outbox.exceptions import OutboxError
from celery_outbox.execute.payload import decode_call
from celery_outbox.log import cause, log_event
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox")

_CELERYS = "celery.app.control:Control"
_OURS = "celery_outbox.operate.revoke:OutboxControl"


class DurableRevoke:
    """Put before a class of Celery's remote control: what revokes goes to the database first.

    ``revoke``, ``terminate``, the results' ``revoke()`` and ``celery control revoke`` all end in
    one broadcast, which is caught here. With a ``destination`` it is left to those workers.
    """

    app: Any

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        destination: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """Send a command to the workers, as :meth:`celery.app.control.Control.broadcast`.

        Raises:
            sqlalchemy.exc.SQLAlchemyError, OutboxError: the database was not reached: only the
                workers that run now were told.
            kombu.exceptions.OperationalError: the broker was not reached, and there are tasks
                among those revoked that the database cannot decide about.
        """
        send = partial(
            super().broadcast,  # type: ignore[misc]
            command,
            arguments,
            destination,
            *more,
            **options,
        )
        if command != "revoke" or destination:
            return send()
        ids = maybe_list((arguments or {}).get("task_id", options.get("task_id"))) or []
        try:
            revoked = self.app._celery_outbox.revoke(ids)
        except (SQLAlchemyError, OutboxError):
            # A body that must be stopped is stopped all the same.
            send()
            raise
        answer = None
        try:
            answer = send()
        except Exception as error:  # transports raise errors of their libraries
            if revoked.undecided:
                raise
            # The guard drops what the database says is cancelled.
            log_event(logger, logging.WARNING, "outbox.revoke_not_broadcast", error=cause(error))
        for job in revoked.cancelled:
            if job.published_at is None:
                tell_backend(self.app, job)
        return answer


class OutboxControl(DurableRevoke, CeleryControl):
    """Celery's remote control, with revokes that last."""


def revoke_in_the_database(app: Celery) -> None:
    """Make an app's ``control`` durable in what it revokes; safe to repeat."""
    current = app.control_cls
    if current == _CELERYS:
        app.control_cls = _OURS
    elif current != _OURS and getattr(current, "func", None) is not _derived:
        app.control_cls = partial(_derived, current)
    made = app.__dict__.get("control")
    if made is not None and not isinstance(made, DurableRevoke):
        made.__class__ = _durable(type(made))


def _derived(control: Any, app: Celery) -> Any:
    return _durable(symbol_by_name(control))(app=app)


def _durable(control: type) -> type:
    return type(control.__name__, (DurableRevoke, control), {})


def tell_backend(app: Celery, job: Job) -> None:
    """Tell the result backend that a job was revoked which no worker will ever meet."""
    try:
        headers, properties = job.envelope.headers, job.envelope.properties
        call = decode_call(app, job)
        names = ("reply_to", "correlation_id")
        request = Context(
            {**headers, **{name: properties.get(name) for name in names}, **call.embed},
            args=call.args,
            kwargs=call.kwargs,
        )
        task = app.tasks.get(job.task)
        with reporting(job.id):
            (app if task is None else task).backend.mark_as_revoked(
                job.id, "revoked", request=request, store_result=not headers.get("ignore_result")
            )
    except Exception:  # the result backend may be anything, and the job is cancelled
        log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=job.id)
