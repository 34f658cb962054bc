"""The base class that a team swaps in: ``Celery(..., task_cls="celery_outbox:OutboxTask")``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore
from celery.result import AsyncResult
from kombu.exceptions import EncodeError
from sqlalchemy.orm import Session

from celery_outbox.app import Outbox
from celery_outbox.context import running_job
from celery_outbox.core.result_key import fill_result_key
from celery_outbox.core.retry import RetryPolicy
from celery_outbox.exceptions import ConfigurationError, NotInJob
from celery_outbox.execute.attempt import Attempt
from celery_outbox.execute.celery_versions import FIXED_OPTIONS
from celery_outbox.execute.hold import Lease
from celery_outbox.execute.poison import KeepPoison
from celery_outbox.execute.result_store import ResultStore
from celery_outbox.execute.steps import DeclareQuarantine, Heartbeat
from celery_outbox.record.payload import culprit
from celery_outbox.record.result import RecordedResult
from celery_outbox.task_class import (
    check_class,
    check_options,
    check_strategy,
    fix_options,
    make_outermost,
)


class OutboxTask(Task):
    """A task whose calls are recorded in the database and whose runs are guarded.

    Attributes that a task may set, in the class or in the decorator:

    ``max_attempts``
        attempts in all, the first included (setting ``outbox_max_attempts``).
    ``retry_policy``
        a :class:`~celery_outbox.RetryPolicy` for delays and limit.
    ``permanent_for``, ``retry_for``
        tuples of error classes that will not pass, or may.
    ``classify``
        a function that gets an error and answers ``"permanent"``, ``"retryable"`` or ``None``.
    ``result_key``
        template of the name under which the result is durable: ``"reports/{job_id}.csv"``.
    ``transactional``
        the body runs in one transaction (:attr:`session`), which is committed together with the
        jobs that it enqueues and with the job's success, or not at all.
    ``derive_child_ids``
        jobs that the body enqueues get ids made from this job's id, their task, arguments and
        ordinal, so that an attempt that runs again does not enqueue them twice (default); an own
        ``task_id`` stays as it is.
    ``relayed``
        the task runs in another service, which needs no outbox: its message goes out in full, and
        the job ends as ``relayed`` when the broker has confirmed it.
    """

    abstract = True

    acks_late = FIXED_OPTIONS["acks_late"]
    acks_on_failure_or_timeout = FIXED_OPTIONS["acks_on_failure_or_timeout"]
    acks_on_failure = FIXED_OPTIONS["acks_on_failure"]
    acks_on_timeout = FIXED_OPTIONS["acks_on_timeout"]
    reject_on_worker_lost = FIXED_OPTIONS["reject_on_worker_lost"]
    retry_on_worker_lost = FIXED_OPTIONS["retry_on_worker_lost"]
    Request = "celery_outbox.execute.request:OutboxRequest"

    #: Celery's own limit for results in logs, events and Flower: they are not shown.
    resultrepr_maxsize = 0

    max_attempts: int | None = None
    retry_policy: RetryPolicy | None = None
    permanent_for: tuple[type[BaseException], ...] = ()
    retry_for: tuple[type[BaseException], ...] = ()
    classify = None
    result_key: str | None = None
    transactional: bool = False
    derive_child_ids: bool = True
    relayed: bool = False

    _celery_tracer: Any = None
    _started_strategy: bool = False

    @property
    def outbox(self) -> Outbox:
        """The outbox of this task's app."""
        return Outbox.of(self._get_app())

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """Bind the class to an app, as :meth:`celery.Task.bind`, and to the guard."""
        bound = super().bind(app)
        if getattr(cls.on_bound, "__func__", None) is not OutboxTask.__dict__["on_bound"].__func__:
            # A hook for users, who need not call ours.
            cls._set_up(app)
        return bound

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Called when the class is bound to an app; a hook, as :meth:`celery.Task.on_bound`."""
        cls._set_up(app)
        super().on_bound(app)

    @classmethod
    def _set_up(cls, app: Celery) -> None:
        check_options(cls)
        fix_options(cls)
        # Also for apps whose task_cls is another one.
        Outbox.of(app)
        app.steps["worker"].add(Heartbeat)
        app.steps["consumer"] |= {DeclareQuarantine, KeepPoison}
        check_class(cls, OutboxTask)
        check_strategy(cls, OutboxTask)
        make_outermost(cls, OutboxTask._run_guarded)

    # -- calling -----------------------------------------------------------------------

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        session: Any = None,
        **options: Any,
    ) -> AsyncResult:
        """Record the call in the caller's transaction; a dispatcher publishes it after the commit.

        Arguments:
            task_id: a stable key of the operation: a second call with it finds the first job
                and records nothing, whatever that job's state.
            producer: ignored: nothing is sent to the broker here.
            session: a SQLAlchemy Session or Connection whose transaction the call belongs to.
            options: everything else that Celery's ``apply_async`` takes.

        Returns:
            A result whose ``id`` is the job id.

        Raises:
            celery_outbox.RecordError: the call cannot be recorded; nothing was written.
        """
        app: Celery = self._get_app()
        options.update(link=link, link_error=link_error, shadow=shadow)
        if app.conf.task_always_eager:
            call = partial(super().apply_async, args, kwargs, task_id=task_id, **options)
            with nullcontext() if session is None else self.outbox.use(session):
                return self._run_eagerly(call, args, kwargs, options.get("serializer"))
        return self.outbox.record_call(
            self,
            super().apply_async,
            args,
            kwargs,
            task_id=task_id,
            session=session,
            options=options,
        )

    def _run_eagerly(
        self, call: Callable[[], AsyncResult], args: Any, kwargs: Any, serializer: str | None
    ) -> AsyncResult:
        """Make a call in eager mode: what cannot be recorded is refused as it would be."""
        try:
            return call()
        except EncodeError as error:
            refused = culprit(self.name, serializer or self.serializer, args, kwargs)
            # Else the body has raised it.
            raise (refused or error) from error

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Ask for another attempt, as :meth:`celery.Task.retry` does: its message is a row in
        the database, written together with the end of this attempt."""
        attempt = self._attempt()
        if attempt is None or self.request.called_directly or self.request.is_eager:
            return super().retry(*args, **kwargs)
        error = kwargs.get("exc") or (args[2] if len(args) > 2 else None)
        with attempt.asking_again(error):
            return super().retry(*args, **kwargs)

    def AsyncResult(self, task_id: str, **kwargs: Any) -> AsyncResult:
        """The result of a job, as :meth:`celery.Task.AsyncResult`; opens no connection."""
        return RecordedResult(task_id, app=self._get_app(), task_name=self.name, **kwargs)

    def replace(self, sig: Any) -> Any:
        """Go on as another task, chain, group or chord under this job's id, as
        :meth:`celery.Task.replace` does: the job ends with the last step."""
        with self._as_replacement():
            return super().replace(sig)

    def on_replace(self, sig: Any) -> Any:
        """Record what stands for this job from now on, together with the end of this attempt."""
        attempt = self._attempt()
        is_canvas = getattr(sig, "subtask_type", None) in ("chain", "group", "chord")
        if attempt is None or not is_canvas or self.request.is_eager:
            return super().on_replace(sig)
        attempt.go_on_as(sig.delay)
        raise Ignore("Replaced by new task")

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Any:
        """Add a member to the chord that this job is a member of, as
        :meth:`celery.Task.add_to_chord` does: in one transaction with the call, unless ``lazy``."""
        with self.outbox.together():
            return super().add_to_chord(sig, lazy)

    @contextmanager
    def _as_replacement(self) -> Iterator[None]:
        attempt = self._attempt()
        if attempt is not None:
            attempt.replacing = True
        try:
            yield
        finally:
            if attempt is not None:
                attempt.replacing = False

    # -- running -----------------------------------------------------------------------

    def _run_guarded(self, call: Callable[[], Any]) -> Any:
        """Run the most derived ``__call__``: guarded in a worker, as it is anywhere else."""
        attempt = running_job.get()
        if not isinstance(attempt, Attempt) or attempt.entered or attempt.task.name != self.name:
            if self.transactional:
                with self.outbox.transaction():
                    return call()
            return call()
        return attempt.execute(call)

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        """What a worker does with the deliveries of this task; for those who override it, see
        :meth:`celery.Task.start_strategy`."""
        self._started_strategy = True
        return super().start_strategy(app, consumer, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body, with the request that a worker has for it; what classes override."""
        inherited = super().__call__
        request = self.request_stack.top
        if (
            inherited.__func__ is not Task.__call__
            or request is None
            or request.called_directly
            or request._protected
        ):
            return inherited(*args, **kwargs)
        # Celery's own __call__ pushes an empty request over the one that its tracer made,
        # unless a worker has patched it (celery.app.trace, _install_stack_protection).
        request._protected = 1
        return self.run(*args, **kwargs)

    @property
    def __trace__(self) -> Any:
        """Celery's tracer of this task, inside the guard."""
        tracer = self._celery_tracer
        if tracer is None:
            return None
        guard = self.outbox.guard

        def guarded(uuid: str, args: Any, kwargs: Any, request: Any = None) -> Any:
            return guard.trace(self, tracer, uuid, args, kwargs, request or {})

        return guarded

    @__trace__.setter
    def __trace__(self, tracer: Any) -> None:
        self._celery_tracer = tracer

    # -- in the body -------------------------------------------------------------------

    @property
    def idempotency_key(self) -> str | None:
        """A key that is the same in every attempt of this job, for external services.

        ``None`` in a direct call, which has no identity.
        """
        key: str | None = self.request.id
        return key

    @property
    def session(self) -> Session:
        """The session whose transaction the body runs in (``transactional=True``).

        Raises:
            NotInJob: no body of this task runs in a transaction here.
        """
        session = self.outbox.current_session()
        if session is None:
            raise NotInJob(what="the session of a transaction", task=self.name)
        return session

    def transaction(self, result: Any = None) -> AbstractContextManager[Session]:
        """A transaction for the end of a body that also does something else before.

        At the end of the block, what was written through the session, the jobs that were
        enqueued in it and the success of this job are committed together. What the body does
        after the block does not belong to the job any more. Outside a worker it is a plain
        transaction.

        Arguments:
            result: the job's result; by default what the body returns, which is stored when it
                has returned and may be lost in a crash between.

        Raises:
            TransactionOver: it is not the first block of this attempt, or the task has a
                ``result_key`` and is not ``transactional``.
            LeaseLost: at the end of the block: another attempt owns the job, and nothing was
                committed.
        """
        attempt = self._attempt()
        if attempt is None:
            return self.outbox.transaction()
        return attempt.in_transaction(result)

    @property
    def lease(self) -> Lease:
        """The hold that this attempt has on its job.

        Raises:
            NotInJob: no worker is running a job of this task here.
        """
        attempt = self._attempt()
        if attempt is None:
            raise NotInJob(what="lease", task=self.name)
        return attempt.lease

    @property
    def filled_result_key(self) -> str | None:
        """This job's ``result_key`` with its placeholders filled in; ``None``: it has none.

        Raises:
            NotInJob: in a direct call, which has no id.
        """
        attempt = self._attempt()
        if attempt is not None:
            return attempt.job.result_key
        request = self.request
        if request.id is None and self.result_key is not None:
            raise NotInJob(what="the filled result key", task=self.name)
        return fill_result_key(
            self.name, self.result_key, str(request.id), request.args, request.kwargs
        )

    @property
    def result_store(self) -> ResultStore:
        """Where results with a ``result_key`` go.

        Raises:
            ConfigurationError: ``outbox_result_store`` is not set.
        """
        return self.outbox.result_store

    def write_result(self, data: bytes | str | Iterable[bytes]) -> str:
        """Make ``data`` durable under this job's result key, unless an earlier attempt did.

        Arguments:
            data: bytes, text, or chunks of bytes.

        Returns:
            The key.

        Raises:
            ConfigurationError: the task has no ``result_key``, or there is no result store.
        """
        key = self.filled_result_key
        if key is None:
            raise ConfigurationError(
                setting="result_key", problem=f"task {self.name} has none", remedy="Give it one."
            )
        self.result_store.write(key, data)
        return key

    def _attempt(self) -> Attempt | None:
        attempt = running_job.get()
        if isinstance(attempt, Attempt) and attempt.task.name == self.name:
            return attempt
        return None
