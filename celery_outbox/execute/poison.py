"""What the worker's consumer does with a message that can never become a request.

Stock Celery acknowledges some of these, rejects others with a log line, and dies of the rest,
after which the broker hands them to the next worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery import bootsteps, signals
from celery.exceptions import NotRegistered
from celery.utils.objects import Bunch
from celery.worker import state as worker_state
from kombu.message import Message

from celery_outbox.context import reporting
from celery_outbox.core.classification import error_code
from celery_outbox.core.reasons import Reason
from celery_outbox.execute.examine import Fault, examine
from celery_outbox.execute.foreign import Foreign
from celery_outbox.execute.outside import end_foreign
from celery_outbox.execute.overdue_ack import outlive_overdue_acks
from celery_outbox.execute.prefetch import restore_in_the_loop
from celery_outbox.execute.rate_limits import hold_once
from celery_outbox.execute.unreadable import read_everything
from celery_outbox.log import cause, log_event
from celery_outbox.queues import declared_with_dead_letters, is_rabbitmq, queue_of
from celery_outbox.store.patience import FIRST_PAUSE, LONGEST_PAUSE

logger = logging.getLogger("celery_outbox.execute")

MALFORMED = str(Reason.MALFORMED)


class KeepPoison(bootsteps.StartStopStep):
    """Puts this package's handlers for messages that cannot run in the place of Celery's."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        # Before any step starts: one of them hands a handler on to kombu.
        Handlers(parent).install()
        restore_in_the_loop(parent)
        hold_once(parent)
        self._has_warned = False

    def start(self, parent: Any) -> None:
        """See to it that neither unreadable messages nor a broker that will not wait end the
        worker, and warn about queues whose rejected and dropped messages the broker does not
        keep. Celery makes the connection again when it is lost."""
        read_everything(parent.connection)
        outlive_overdue_acks(parent.connection)
        if not self._has_warned:
            self._has_warned = True
            warn_without_dead_letters(parent.app)


def warn_without_dead_letters(app: Any) -> None:
    """Log one warning for each queue on RabbitMQ that the worker consumes and that has, as far
    as the configuration tells, no quarantine queue behind it."""
    config = app._celery_outbox.config
    if config.dead_letter == "broker" or not is_rabbitmq(app):
        return
    for queue in sorted(app.amqp.queues.consume_from):
        if not declared_with_dead_letters(app, config, queue):
            log_event(
                logger,
                logging.WARNING,
                "outbox.queue_without_dead_letters",
                queue=queue,
                problem="what RabbitMQ drops from it (past a delivery limit, for one) is gone",
                remedy=f"declare it with outbox.queue({queue!r}), or set a policy and"
                ' outbox_dead_letter = "broker"',
            )


class Handlers:
    """The handlers of one consumer.

    Arguments:
        consumer: Celery's.
    """

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.app = consumer.app
        self.guard = consumer.app._celery_outbox.guard
        self._create_task_handler = consumer.create_task_handler

    def install(self) -> None:
        """Take the place of Celery's handlers."""
        self.consumer.create_task_handler = self.create_task_handler
        self.consumer.on_decode_error = self.on_decode_error
        self.consumer.on_unknown_message = self.on_unknown_message
        self.consumer.on_unknown_task = self.on_unknown_task
        self.consumer.on_invalid_task = self.on_invalid_task

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Message], Any]:
        """Celery's handler of deliveries, with a look at each message before it."""
        receive = self._create_task_handler(*args, **options)

        def on_task_received(message: Message) -> Any:
            fault = examine(message, self.consumer.strategies.__contains__, self._is_guarded)
            if fault is not None:
                return self.keep(message, fault)
            try:
                return receive(message)
            except (*self.consumer.connection_errors, *self.consumer.channel_errors):
                raise
            except Exception as error:
                if self._has_begun(message):
                    raise
                log_event(logger, logging.ERROR, "outbox.receive_failed", exc_info=True)
                return self.keep(message, Fault(Reason.MALFORMED, error_code(error)))

        return on_task_received

    def on_decode_error(self, message: Message, exc: Exception) -> None:
        """Keep a message whose body cannot be read; stock Celery acknowledges it."""
        self.keep(message, Fault(Reason.UNDECODABLE, error_code(exc)), exc)

    def on_unknown_message(self, body: Any, message: Message) -> None:
        """Keep a message that is no task's."""
        self.keep(message, Fault(Reason.MALFORMED, f"{MALFORMED}:task"))

    def on_invalid_task(self, body: Any, message: Message, exc: Exception) -> None:
        """Keep a message that Celery cannot read as a task's."""
        self.keep(message, Fault(Reason.MALFORMED, error_code(exc)), exc)

    def on_unknown_task(self, body: Any, message: Message, exc: Exception) -> None:
        """Keep a message whose task this worker does not have."""
        self.keep(message, Fault(Reason.UNKNOWN_TASK, str(Reason.UNKNOWN_TASK)), exc)

    def keep(
        self, message: Message, fault: Fault, exc: Exception | None = None, pause: float = 0.0
    ) -> None:
        """Record a message in the database, and then reject it.

        While the database does not take it, it stays unacknowledged and is tried again: it holds
        a place of the prefetch, but neither the worker nor its event loop.

        Arguments:
            pause: seconds that were waited before this try.
        """
        if message.acknowledged or message.channel is None:
            return
        foreign = Foreign.of(message, self._queue_of(message))
        try:
            job_id, keeps = end_foreign(self.guard, foreign, fault.reason, fault.code)
        except Exception as error:  # whatever it is, the message must not be lost
            log_event(
                logger,
                logging.ERROR,
                "outbox.quarantine_failed",
                job=foreign.job_id or foreign.own_id,
                reason=str(fault.reason),
                error=cause(error),
            )
            pause = min(max(pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            self.consumer.timer.call_after(pause, self._again, (message, fault, exc, pause))
            return
        if not keeps:
            message.ack_log_error(logger, self.consumer.connection_errors)
            return
        log_event(
            logger,
            logging.ERROR,
            "outbox.poison",
            job=job_id,
            names=foreign.job_id,
            task=foreign.task,
            queue=foreign.queue,
            reason=str(fault.reason),
            error=fault.code,
        )
        message.reject_log_error(logger, self.consumer.connection_errors)
        self._tell(message, foreign, fault, exc)

    def _again(self, *arguments: Any) -> None:
        # The timer of some pools is a thread, and a channel is for one thread.
        self.consumer.call_soon(self.keep, *arguments)

    def _tell(
        self, message: Message, foreign: Foreign, fault: Fault, exc: Exception | None
    ) -> None:
        """Tell Celery's side what it would have told: the result backend, events and signals."""
        with reporting(foreign.job_id or foreign.own_id):
            self._tell_celery(message, foreign, fault, exc)

    def _tell_celery(
        self, message: Message, foreign: Foreign, fault: Fault, exc: Exception | None
    ) -> None:
        if fault.reason is not Reason.UNKNOWN_TASK:
            signals.task_rejected.send(sender=self.consumer, message=message, exc=exc)
            return
        job_id, name = foreign.job_id or foreign.own_id, foreign.task
        properties = foreign.envelope.properties
        request = Bunch(
            name=name,
            chord=None,
            root_id=foreign.envelope.headers.get("root_id"),
            correlation_id=properties.get("correlation_id"),
            reply_to=properties.get("reply_to"),
            errbacks=None,
        )
        try:
            self.app.backend.mark_as_failure(job_id, NotRegistered(name), request=request)
        except Exception:  # the result backend may be anything; the database has the truth
            log_event(logger, logging.ERROR, "outbox.report_failed", exc_info=True, job=job_id)
        if self.consumer.event_dispatcher:
            self.consumer.event_dispatcher.send(
                "task-failed", uuid=job_id, exception=f"NotRegistered({name!r})"
            )
        signals.task_unknown.send(
            sender=self.consumer, message=message, exc=exc, name=name, id=job_id
        )

    def _is_guarded(self, name: str) -> bool:
        return hasattr(type(self.app.tasks[name]), "outbox")

    def _queue_of(self, message: Message) -> str | None:
        info = message.delivery_info if isinstance(message.delivery_info, dict) else {}
        tag = info.get("consumer_tag")
        tags = getattr(self.consumer.task_consumer, "_active_tags", None) or {}
        for queue, active in tags.items():
            if tag is not None and active == tag:
                return str(queue)
        return queue_of(self.app, info.get("exchange"), info.get("routing_key"))

    def _has_begun(self, message: Message) -> bool:
        """Whether Celery made a request of a message and the pool may have it."""
        requests = [*worker_state.reserved_requests, *worker_state.active_requests]
        return any(request.message is message for request in requests)
