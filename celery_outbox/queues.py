"""The queues: those whose rejected messages the broker keeps, and the one where it keeps them."""

from __future__ import annotations

from typing import Any

import celery
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_outbox.config import Config
from celery_outbox.exceptions import ConfigurationError

#: From this version on, Celery consumes quorum queues (it sets the prefetch per consumer).
_QUORUM_SINCE = (5, 5)

#: Options and arguments of a queue that RabbitMQ refuses for a quorum queue.
_ONLY_CLASSIC = frozenset(
    {"auto_delete", "exclusive", "max_priority", "x-max-priority", "x-queue-mode"}
)


def is_rabbitmq(app: Celery) -> bool:
    """Whether the app's broker speaks AMQP; opens no connection.

    Raises:
        ConfigurationError: kombu has no transport for the broker's URL.
    """
    try:
        return bool(app.connection_for_write().transport.driver_type == "amqp")
    except (KeyError, ImportError) as error:
        # Without the URL: it may hold a password.
        raise ConfigurationError(
            setting="broker_url",
            problem=f"its transport cannot be used ({error})",
            remedy="Example: amqp://user:password@host//",
        ) from error


def consumes_quorum_queues() -> bool:
    """Whether the installed Celery can consume quorum queues."""
    return (celery.VERSION.major, celery.VERSION.minor) >= _QUORUM_SINCE


def quarantine_queue(app: Celery, config: Config) -> Queue:
    """The queue for copies of failed jobs' messages, with an exchange of the same name."""
    name = config.quarantine_queue
    arguments = {"x-queue-type": "quorum"} if _use_quorum(app) else {}
    return Queue(
        name,
        Exchange(name, type="direct", durable=True),
        routing_key=name,
        durable=True,
        queue_arguments=arguments,
    )


def outbox_queue(app: Celery, config: Config, name: str, **options: Any) -> Queue:
    """A durable queue whose rejected messages go to the quarantine queue (on RabbitMQ).

    A quorum queue where Celery can consume one, unless the options name another type, or they or
    ``task_queue_max_priority`` ask for what only a classic queue has. It dead-letters at least
    once, which needs ``reject-publish`` (RabbitMQ documentation, "Quorum Queues", section "Dead
    Lettering"); a classic queue refuses these arguments.
    """
    options.setdefault("durable", True)
    own = options.pop("queue_arguments", None) or {}
    arguments: dict[str, Any] = {}
    if is_rabbitmq(app):
        arguments = {
            "x-dead-letter-exchange": config.quarantine_queue,
            "x-dead-letter-routing-key": config.quarantine_queue,
        }
        # Celery adds it to the arguments of every queue.
        priorities = {"max_priority": app.conf.task_queue_max_priority}
        if _wants_quorum(own, {**priorities, **options}):
            arguments |= {
                "x-queue-type": "quorum",
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
    arguments |= own
    options.setdefault("exchange", Exchange(name, type="direct", durable=True))
    options.setdefault("routing_key", name)
    return Queue(name, queue_arguments=arguments, **options)


def broker_dead_letters(app: Celery, config: Config, queue: str | None) -> bool:
    """Whether the broker copies rejected messages of ``queue`` to the quarantine queue.

    As far as the configuration tells (``outbox_dead_letter = "auto"``): the broker is RabbitMQ
    and the queue is declared with our exchange for dead letters.
    """
    if config.dead_letter != "auto":
        return config.dead_letter == "broker"
    return declared_with_dead_letters(app, config, queue)


def declared_with_dead_letters(app: Celery, config: Config, queue: str | None) -> bool:
    """Whether the configuration declares ``queue`` on RabbitMQ with our exchange for dead
    letters."""
    if queue is None or queue not in app.amqp.queues or not is_rabbitmq(app):
        return False
    arguments = app.amqp.queues[queue].queue_arguments or {}
    return bool(arguments.get("x-dead-letter-exchange") == config.quarantine_queue)


def queue_of(app: Celery, exchange: str | None, routing_key: str | None) -> str | None:
    """The queue that a message came from, as far as its routing and the configuration tell."""
    if not exchange:
        # The default exchange: the routing key is the queue.
        return routing_key or None
    for name, queue in app.amqp.queues.items():
        if queue.exchange.name == exchange and queue.routing_key == routing_key:
            return str(name)
    return None


def depth(app: Celery, queue: str, timeout: float) -> int | None:
    """How many messages a queue of the broker holds, delivered ones not counted.

    Arguments:
        timeout: seconds to wait for the broker.

    Returns:
        ``None`` when the broker cannot be asked; 0 when there is no such queue.
    """
    connection = app.connection_for_read(connect_timeout=timeout, heartbeat=0)
    try:
        connection.ensure_connection(max_retries=1, timeout=timeout)
        channel = connection.channel()
        try:
            return int(channel.queue_declare(queue, passive=True).message_count)
        except connection.channel_errors:
            return 0
    except (OperationalError, OSError, *connection.connection_errors):
        return None
    finally:
        connection.collect()


def _wants_quorum(arguments: dict[str, Any], options: dict[str, Any]) -> bool:
    named = arguments.get("x-queue-type")
    if named is not None:
        return bool(named == "quorum")
    needs_classic = any(options.get(name) for name in _ONLY_CLASSIC) or not options["durable"]
    return consumes_quorum_queues() and not needs_classic and not _ONLY_CLASSIC & set(arguments)


def _use_quorum(app: Celery) -> bool:
    return is_rabbitmq(app) and consumes_quorum_queues()
