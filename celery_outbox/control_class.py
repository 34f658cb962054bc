"""What takes the place of Celery's remote control in an app: revokes that last."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import Celery
from celery.app.control import Control
from celery.utils.functional import maybe_list
from kombu.utils.imports import symbol_by_name

_CELERYS = "celery.app.control:Control"
_OURS = "celery_outbox.control_class:OutboxControl"


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

        A revoke in the caller's transaction cancels the jobs that wait in that transaction, and
        tells of them after its commit; of all others it tells at once.

        Raises:
            UnusableSession: the caller's session cannot ask its database here; nothing was done.
            sqlalchemy.exc.SQLAlchemyError, OutboxError: the database was not reached: only the
                workers that run now were told, or nobody if it was in the caller's transaction.
            kombu.exceptions.OperationalError: the broker was not reached, and there are tasks
                among those revoked that the database cannot decide about.
        """
        send = partial(super().broadcast, command)  # type: ignore[misc]
        if command != "revoke" or destination:
            return send(arguments, destination, *more, **options)
        given = {**(arguments or {})}
        if "task_id" in options:
            given["task_id"] = options.pop("task_id")
        # The second of these parameters of Celery's.
        replies = bool(options.get("reply", more[1] if len(more) > 1 else False))
        return _outbox_of(self.app).revoke(
            maybe_list(given.get("task_id")) or [],
            lambda only: send(
                given if only is None else {**given, "task_id": only},
                destination,
                *more,
                **options,
            ),
            replies=replies,
        )


class OutboxControl(DurableRevoke, Control):
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


def _outbox_of(app: Celery) -> Any:
    # Celery makes a control by the name of its class, which knows nothing of an outbox.
    from celery_outbox.app import Outbox

    return Outbox.of(app)


def _derived(control: Any, app: Celery) -> Any:
    return _durable(symbol_by_name(control))(app=app)


def _durable(control: type) -> type:
    return type(control.__name__, (DurableRevoke, control), {})
