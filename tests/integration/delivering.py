"""Delivers messages to a task in this process, as a worker does, without a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.app.trace import TraceInfo, build_tracer

from tests.factories import add_task as register
from tests.factories import return_nothing


def add_task(app: Celery, body: Callable[..., Any] = return_nothing, **options: Any) -> Task:
    """Register a task; its body may be a lambda, which Celery cannot name."""
    body.__name__ = "body"
    return register(app, body, **options)


def deliver(task: Task, job_id: str, **request: Any) -> str:
    """Deliver the message of a job to a worker; returns Celery's state of the delivery."""
    info = outcome(task, job_id, **request)
    return "SUCCESS" if info is None else info.state


def outcome(task: Task, job_id: str, **request: Any) -> TraceInfo | None:
    """Deliver the message of a job to a worker; returns what Celery's tracer says of its end, and
    ``None`` of a success."""
    if task._celery_tracer is None:
        task.__trace__ = build_tracer(task.name, task, app=task.app)
    message = {"id": job_id, "task": task.name, "outbox_version": 1, "hostname": "worker"}
    message["delivery_info"] = {"exchange": "", "routing_key": "celery", "redelivered": False}
    return task.__trace__(job_id, [], {}, {**message, **request}).info


def deliver_stock(task: Task, job_id: str, args: list[Any], **request: Any) -> str:
    """Deliver a message of a client without the outbox; returns Celery's state of it."""
    if task._celery_tracer is None:
        task.__trace__ = build_tracer(task.name, task, app=task.app)
    message = {"id": job_id, "task": task.name, "hostname": "worker", **request}
    message["delivery_info"] = {"exchange": "", "routing_key": "celery", "redelivered": False}
    traced = task.__trace__(job_id, args, {}, message)
    return "SUCCESS" if traced.info is None else traced.info.state


def again(task: Task, job_id: str) -> str:
    """Deliver it as a broker does whose first delivery was not acknowledged."""
    info = {"exchange": "", "routing_key": "celery", "redelivered": True}
    return deliver(task, job_id, delivery_info=info)


def raising(*errors: BaseException) -> Callable[..., Any]:
    """A body that raises these one after the other, and then returns."""
    left = list(errors)

    def body(*args: Any, **kwargs: Any) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return body
