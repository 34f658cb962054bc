"""The queue on which a caller waits for answers, with Celery's result backend ``rpc://``.

Celery declares it at each call, so that an answer which comes before the caller looks for it is
kept. A recorded call opens no connection: the dispatcher declares it, before the message goes out.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from celery import Celery
from celery.app import backends
from celery.backends.rpc import RPCBackend
from kombu import Queue

from celery_outbox.dispatch.wire import Wire


class ReplyQueues:
    """The reply queues of the calls that one app makes."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def of(self, wire: Wire) -> Queue | None:
        """The queue for the answer to a message; ``None``: there is none.

        A call that a job made has none of its own, as in Celery: nobody may wait in a worker.
        """
        name = wire.properties.get("reply_to")
        if not name or wire.headers.get("parent_id") or self._like is None:
            return None
        like = self._like
        return Queue(
            name,
            like.exchange,
            name,
            durable=like.durable,
            auto_delete=like.auto_delete,
            expires=like.expires,
        )

    @cached_property
    def _like(self) -> Any:
        """A queue as the backend declares it, which differs between Celery's versions."""
        # Looked at before it is made: some backends open a connection then.
        kind, url = backends.by_url(
            self._app.backend_cls or self._app.conf.result_backend, self._app.loader
        )
        if not (isinstance(kind, type) and issubclass(kind, RPCBackend)):
            return None
        return kind(app=self._app, url=url).binding
