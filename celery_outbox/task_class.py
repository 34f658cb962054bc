"""What a user's task class may say and change, and what would get past the guard unseen."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from celery import Task
from kombu.utils.imports import symbol_by_name

from celery_outbox.core.retry import RetryPolicy
from celery_outbox.exceptions import ConfigurationError, NotAvailable
from celery_outbox.execute.celery_versions import FIXED_OPTIONS
from celery_outbox.log import log_event

logger = logging.getLogger("celery_outbox")


def check_options(cls: type[Task]) -> None:
    """Refuse values that mean nothing, and options that this version does not keep.

    Raises:
        ConfigurationError: a value is not usable.
        NotAvailable: the option is a later version's.
    """
    for option in ("irreversible", "exclusive"):
        if getattr(cls, option, None):
            raise NotAvailable(
                what=f"{option}=... (task {cls.name})",
                remedy="Remove it, or install a version that has it.",
            )
    expected: dict[str, tuple[Any, str]] = {
        "max_attempts": (int, "a whole number of at least 1"),
        "retry_policy": (RetryPolicy, "a RetryPolicy"),
        "permanent_for": (tuple, "a tuple of exception classes"),
        "retry_for": (tuple, "a tuple of exception classes"),
        "result_key": (str, "text such as 'reports/{job_id}.csv'"),
        "transactional": (bool, "True or False"),
        "derive_child_ids": (bool, "True or False"),
        "relayed": (bool, "True or False"),
    }
    for option, (kind, what) in expected.items():
        value = getattr(cls, option)
        wrong = value is not None and not isinstance(value, kind)
        if wrong or (option == "max_attempts" and value is not None and value < 1):
            raise ConfigurationError(
                setting=f"{option} of task {cls.name}",
                problem=f"{value!r} is not {what}",
                remedy="",
            )


def fix_options(cls: type[Task]) -> None:
    """Overrule what would lose jobs, or deliver them for ever."""
    for option, value in FIXED_OPTIONS.items():
        if getattr(cls, option) != value:
            log_event(
                logger,
                logging.WARNING,
                "outbox.option_overruled",
                task=cls.name,
                option=option,
                by=value,
            )
            setattr(cls, option, value)


def check_class(cls: type[Task], base: type[Task]) -> None:
    """Refuse a task class whose deliveries the guard would not see.

    Arguments:
        base: :class:`~celery_outbox.OutboxTask`.

    Raises:
        ConfigurationError: says what is in the way, and what to do instead.
    """
    if inspect.getattr_static(cls, "__trace__") is not base.__dict__["__trace__"]:
        raise _refused(cls, "__trace__", "it replaces the guard", "Override __call__ or run.")
    if cls.Strategy != Task.Strategy:
        raise _refused(
            cls,
            "Strategy",
            "it decides what becomes of a delivery, and may run it past the guard",
            "Override start_strategy() and use what super().start_strategy() returns.",
        )
    if cls.Request != base.Request:
        # Imported here: it brings the worker's half of Celery with it.
        from celery_outbox.execute.request import OutboxRequest

        request = symbol_by_name(cls.Request)
        if not (isinstance(request, type) and issubclass(request, OutboxRequest)):
            raise _refused(
                cls,
                "Request",
                "a pool process that is lost, or a time limit, would not end its attempt",
                "Derive it from celery_outbox.execute.request.OutboxRequest.",
            )


def make_outermost(cls: type[Task], run: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """Put ``run`` around the most derived ``__call__`` of a class, whatever that calls in turn:
    ``super().__call__()``, ``self.run()``, or neither.

    Arguments:
        run: is given the task and what is left to call.
    """
    inner: Any = cls.__call__
    if getattr(inner, "outermost_of", None) is cls:
        return

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not cls:
            # Reached by super() from a class with an outermost one of its own.
            return inner(self, *args, **kwargs)
        return run(self, lambda: inner(self, *args, **kwargs))

    __call__.__doc__ = inner.__doc__
    __call__.outermost_of = cls  # type: ignore[attr-defined]
    cls.__call__ = __call__


def check_strategy(cls: type[Task], base: type[Task]) -> None:
    """See to it, when a worker starts, that an overridden ``start_strategy`` calls ours.

    Arguments:
        base: :class:`~celery_outbox.OutboxTask`; its own one notes that it was called.
    """
    inner: Any = cls.start_strategy
    if inner is base.start_strategy or getattr(inner, "outermost_of", None) is cls:
        return

    def start_strategy(self: Any, app: Any, consumer: Any, **kwargs: Any) -> Any:
        self._started_strategy = False
        handler = inner(self, app, consumer, **kwargs)
        if not self._started_strategy:
            raise _refused(
                cls,
                "start_strategy",
                "it does not call super().start_strategy(), and may run deliveries past the guard",
                "Call it, and use the function that it returns.",
            )
        return handler

    start_strategy.outermost_of = cls  # type: ignore[attr-defined]
    cls.start_strategy = start_strategy


def _refused(cls: type[Task], what: str, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(setting=f"{what} of task {cls.name}", problem=problem, remedy=remedy)
