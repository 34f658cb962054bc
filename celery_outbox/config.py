"""The settings of celery-outbox, read once from ``app.conf`` and validated."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from celery_outbox.core.retry import RetryPolicy
from celery_outbox.exceptions import ConfigurationError

#: Every setting starts with this word.
PREFIX = "outbox_"


@dataclass(frozen=True)
class Config:
    """Settings; each field ``x`` is read from ``app.conf.outbox_x``.

    Attributes:
        database_url: SQLAlchemy URL of the database that holds the outbox tables.
        schema: database schema of the tables; ``None`` is the connection's default.
        table_prefix: start of every table name.
        require_transaction: a call outside a transaction is an error instead of getting
            a transaction of its own.
        max_payload_size: largest serialized payload of a call, in bytes.
        max_attempts: attempts of a job, where its task says nothing.
        retry_delay: seconds before the second attempt.
        retry_factor: growth from one delay to the next.
        retry_max_delay: ceiling of a retry delay, in seconds.
        retry_jitter: random share of a retry delay, 0 to 1.
        lease: seconds for which a worker holds a job without a heartbeat.
        heartbeat_interval: seconds between two heartbeats of a worker.
        dispatch_batch: messages that a dispatcher claims at a time.
        dispatch_lease: seconds for which a dispatcher holds the messages it claimed.
        dispatch_window: messages sent to RabbitMQ before the oldest must be confirmed.
        publish_timeout: seconds to wait for the broker: to connect, to take a message, to confirm.
        poll_interval: seconds between two looks at the database where nothing wakes the
            dispatcher.
        backoff_max: ceiling of the dispatcher's pause in an outage, in seconds.
        maintenance_interval: seconds between two maintenance runs of the dispatcher.
        republish_after: seconds after which a job whose message was published and never
            claimed is published again, unless its queue still holds as many messages.
        database_timeout: seconds for which the database may be silent before its connection is
            cut, and for which a worker waits for an unreachable database before it gives the
            message back to the broker.
        settle_timeout: seconds for which a worker keeps a finished result while the database
            is away; after that the message goes back to the broker.
        notify: wake dispatchers with LISTEN/NOTIFY on PostgreSQL.
        dead_letter: who copies a failed job's message to the quarantine queue: ``"auto"``
            (the broker where the queue is declared with a dead-letter exchange, else the
            outbox), ``"broker"`` (always: a policy does it) or ``"outbox"`` (always).
        quarantine_queue: name of the quarantine queue and its exchange.
        result_store: ``file:///absolute/folder`` where results with a ``result_key`` go.
        error_detail: what is kept of an error beside its code: ``"none"``, ``"message"`` or
            ``"traceback"``.
    """

    database_url: str | None = None
    schema: str | None = None
    table_prefix: str = "outbox_"
    require_transaction: bool = False
    max_payload_size: int = 16 * 1024 * 1024
    max_attempts: int = 3
    retry_delay: float = 5.0
    retry_factor: float = 2.0
    retry_max_delay: float = 600.0
    retry_jitter: float = 0.5
    lease: float = 60.0
    heartbeat_interval: float = 15.0
    dispatch_batch: int = 500
    dispatch_lease: float = 60.0
    dispatch_window: int = 500
    publish_timeout: float = 15.0
    poll_interval: float = 1.0
    backoff_max: float = 30.0
    maintenance_interval: float = 10.0
    republish_after: float = 600.0
    database_timeout: float = 60.0
    settle_timeout: float = 3600.0
    notify: bool = True
    dead_letter: str = "auto"
    quarantine_queue: str = "outbox.quarantine"
    result_store: str | None = None
    error_detail: str = "none"

    def __post_init__(self) -> None:
        _check_types(self)
        for name in _POSITIVE + _NOT_NEGATIVE:
            if not math.isfinite(getattr(self, name)):
                raise _unusable(name, f"{getattr(self, name)!r} is not a finite number")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise _unusable(name, f"{getattr(self, name)!r} is not greater than zero")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise _unusable(name, f"{getattr(self, name)!r} is not one of {allowed}")
        if self.heartbeat_interval * 2 > self.lease:
            raise _unusable(
                "heartbeat_interval",
                f"{self.heartbeat_interval} s lets a lease of {self.lease} s end",
                "Use at most half of outbox_lease.",
            )
        if self.dispatch_lease < 2 * self.publish_timeout:
            raise _unusable(
                "dispatch_lease",
                f"{self.dispatch_lease} s ends while the broker is still waited for",
                "Use at least twice outbox_publish_timeout.",
            )
        if (
            not self.table_prefix.replace("_", "a").isalnum()
            or not self.table_prefix.isascii()
            or len(self.table_prefix) > _MAX_PREFIX
        ):
            raise _unusable("table_prefix", f"{self.table_prefix!r} is not a table name")
        if self.schema is not None and not 0 < len(self.schema) <= _MAX_SCHEMA:
            raise _unusable("schema", f"it must have 1 to {_MAX_SCHEMA} characters")
        try:
            self.retry_policy  # noqa: B018 - built for its checks
        except ValueError as error:
            raise _unusable("retry_* / max_attempts", str(error)) from error

    @property
    def retry_policy(self) -> RetryPolicy:
        """The policy of tasks that have none of their own."""
        return RetryPolicy(
            max_attempts=self.max_attempts,
            delay=self.retry_delay,
            factor=self.retry_factor,
            max_delay=self.retry_max_delay,
            jitter=self.retry_jitter,
        )

    @classmethod
    def from_conf(cls, conf: Mapping[str, Any], **overrides: Any) -> Config:
        """Read the ``outbox_*`` settings.

        Arguments:
            conf: ``app.conf``; its namespace, if it has one, is taken off.
            overrides: fields that are given in code instead.

        Raises:
            ConfigurationError: a setting is unknown or not usable; says which and why.
        """
        known = {field.name for field in fields(cls)}
        for key in [*_outbox_keys(conf), *overrides]:
            if key not in known:
                close = difflib.get_close_matches(key, known, 1)
                raise _unusable(
                    key,
                    "there is no such setting",
                    f"Did you mean {PREFIX}{close[0]}?" if close else "",
                )
        values = {}
        for name in known:
            value = conf.get(PREFIX + name, _MISSING)
            if value is not _MISSING:
                values[name] = value
        return cls(**{**values, **overrides})


_MISSING = object()

_POSITIVE = (
    "max_payload_size",
    "lease",
    "heartbeat_interval",
    "dispatch_batch",
    "dispatch_lease",
    "dispatch_window",
    "publish_timeout",
    "poll_interval",
    "backoff_max",
    "maintenance_interval",
    "republish_after",
    "database_timeout",
    "settle_timeout",
)

#: Settings whose range the retry policy checks.
_NOT_NEGATIVE = ("retry_delay", "retry_factor", "retry_max_delay", "retry_jitter")

#: PostgreSQL cuts names after 63 characters; the longest of ours adds 20 to the prefix.
_MAX_PREFIX = 40

#: PostgreSQL cuts names after 63 characters.
_MAX_SCHEMA = 63

_CHOICES = {
    "dead_letter": ("auto", "broker", "outbox"),
    "error_detail": ("none", "message", "traceback"),
}

_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "str | None": (str, type(None)),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
}


def _check_types(config: Config) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = _KINDS[str(field.type)]
        wrong_bool = isinstance(value, bool) and bool not in kinds
        if wrong_bool or not isinstance(value, kinds):
            # Without the value: it may hold the database's password.
            raise _unusable(field.name, f"it is of type {type(value).__name__}, not {field.type}")


def _outbox_keys(conf: Mapping[str, Any]) -> set[str]:
    """The names, without prefix, of every ``outbox_*`` key, with or without a namespace."""
    # Read first: a configuration that is not loaded yet has no namespace either.
    everything = [str(key) for key in conf]
    namespace = str(getattr(conf, "prefix", None) or "").lower()
    keys = set()
    for key in everything:
        has_namespace = bool(namespace) and key.lower().startswith(namespace)
        # Celery reads what has no namespace in lower case only; the rest may be anybody's.
        name = key.lower().removeprefix(namespace) if has_namespace else key
        if name.startswith(PREFIX):
            keys.add(name.removeprefix(PREFIX))
        elif not namespace and name.startswith(PREFIX.upper()):
            _refuse_upper_case(name)
    return keys


def _refuse_upper_case(key: str) -> None:
    """Refuse a setting that would be ignored; what is no setting of ours is not ours to judge."""
    name = key.lower().removeprefix(PREFIX)
    if name in {field.name for field in fields(Config)}:
        raise _unusable(name, f"{key} is not read", "Write it in lower case.")


def _unusable(name: str, problem: str, remedy: str = "") -> ConfigurationError:
    return ConfigurationError(setting=PREFIX + name, problem=problem, remedy=remedy)
