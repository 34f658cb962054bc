"""Binds a Celery app to a database: the one place where the parts are put together."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from celery import Celery, Task
from celery.result import AsyncResult
from celery.utils.nodenames import gethostname
from kombu import Queue
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from celery_outbox import backend, queues
from celery_outbox.config import Config
from celery_outbox.control_class import revoke_in_the_database
from celery_outbox.core.retry import RetryPolicy
from celery_outbox.dispatch.dispatcher import Dispatcher
from celery_outbox.exceptions import ConfigurationError, UnusableSession
from celery_outbox.execute.chords import Chords
from celery_outbox.execute.guard import Guard
from celery_outbox.execute.result_store import ResultStore, open_store
from celery_outbox.operate.bounded import Bounded
from celery_outbox.operate.control import Control
from celery_outbox.operate.maintenance import Maintenance
from celery_outbox.operate.members import Members
from celery_outbox.operate.reports import Reports
from celery_outbox.operate.revoke import Revoke, Send
from celery_outbox.operate.status import JobStatus
from celery_outbox.record import canvas, canvas_ids
from celery_outbox.record.alone import Alone
from celery_outbox.record.batch import Batches
from celery_outbox.record.binding import begun
from celery_outbox.record.by_name import record_calls_by_name
from celery_outbox.record.chords import ChordRecorder
from celery_outbox.record.owners import Owners
from celery_outbox.record.recorder import Recorder
from celery_outbox.store.database import Database
from celery_outbox.store.engine import (
    begin_immediate,
    check_engine,
    connection_in,
    open_engine,
    transactional,
)
from celery_outbox.store.schema import Tables, build_tables
from celery_outbox.task_names import TaskNames

_ATTRIBUTE = "_celery_outbox"

#: Held while an app gets its outbox: two threads must not make two.
_making = threading.Lock()


class Outbox:
    """The outbox of one Celery app.

    Made by itself for an app whose ``task_cls`` is :class:`~celery_outbox.OutboxTask` and that
    sets ``outbox_database_url``; explicitly where an engine or a session exists already.

    Arguments:
        app: the Celery app.
        engine: for the outbox's own transactions; by default made from ``outbox_database_url``.
        session: a ``scoped_session`` or ``async_scoped_session``, or a callable that returns the
            current Session or ``None``: calls made outside :meth:`use` are recorded in its
            transaction.
        result_store: where results with a ``result_key`` go; by default made from
            ``outbox_result_store``.
        settings: fields of :class:`~celery_outbox.config.Config`, given in code.

    Raises:
        ConfigurationError: the engine is not one, or is asynchronous.
    """

    def __init__(
        self,
        app: Celery,
        *,
        engine: Engine | None = None,
        session: scoped_session[Any] | Callable[[], Session | Connection | None] | None = None,
        result_store: ResultStore | None = None,
        **settings: Any,
    ) -> None:
        if engine is not None:
            check_engine(engine)
        self.app = app
        self._settings = settings
        self._pid = os.getpid()
        self._engine = engine
        self._session = session
        self._result_store = result_store
        self._owners = Owners(session)
        self._worker_id: str | None = None
        self._tasks = TaskNames(app)
        canvas_ids.install()
        record_calls_by_name(app, Outbox.of, self._tasks.find)
        revoke_in_the_database(app)
        backend.install(app, lambda: Outbox.of(app))
        canvas.install(app, _together)
        # Last: from now on other threads find it.
        setattr(app, _ATTRIBUTE, self)

    @classmethod
    def of(cls, app: Celery) -> Outbox:
        """The outbox of ``app``; made from its configuration when there is none."""
        found = getattr(app, _ATTRIBUTE, None)
        if isinstance(found, cls):
            # Without the lock, which a thread may hold while this process is forked.
            return found
        with _making:
            found = getattr(app, _ATTRIBUTE, None)
            return found if isinstance(found, cls) else cls(app)

    @staticmethod
    def exists(app: Celery) -> bool:
        """Whether ``app`` has an outbox already."""
        return isinstance(getattr(app, _ATTRIBUTE, None), Outbox)

    # -- what the parts share ----------------------------------------------------------

    @cached_property
    def config(self) -> Config:
        """The settings.

        Raises:
            ConfigurationError: one of them is not usable.
        """
        return Config.from_conf(self.app.conf, **self._settings)

    @cached_property
    def tables(self) -> Tables:
        """The tables, in a MetaData of their own (``outbox.tables.metadata``)."""
        return build_tables(self.config.table_prefix, self.config.schema)

    @cached_property
    def database(self) -> Database:
        """The tables in their database."""
        return Database(
            self.tables, self._make_engine, self._pid, patience=self.config.database_timeout
        )

    @property
    def engine(self) -> Engine:
        """The engine of this process.

        Raises:
            ConfigurationError: no database is configured.
        """
        return self.database.engine

    @property
    def result_store(self) -> ResultStore:
        """Where results with a ``result_key`` go.

        Raises:
            ConfigurationError: ``outbox_result_store`` is not set.
        """
        if self._result_store is None:
            url = self.config.result_store
            if url is None:
                raise ConfigurationError(
                    setting="outbox_result_store",
                    problem="it is not set, and a task has a result_key",
                    remedy="Example: file:///var/lib/shop/results",
                )
            self._result_store = open_store(url)
        return self._result_store

    @property
    def worker_id(self) -> str:
        """Names this start of the worker: a restart under the same hostname is another one."""
        if self._worker_id is None:
            self._worker_id = f"{gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        return self._worker_id

    # -- recording ---------------------------------------------------------------------

    def use(self, session: Any) -> AbstractContextManager[None]:
        """Record the calls made in this block in the transaction of ``session``.

        Arguments:
            session: a SQLAlchemy Session, scoped_session or Connection, or one of their
                asynchronous kinds.
        """
        return self._owners.use(session)

    def write(self, session: Any) -> None:
        """Write the calls recorded in the transaction of ``session``, before it is committed
        in a way that SQLAlchemy does not see (``connection.connection.commit()``).

        Arguments:
            session: as for :meth:`use`; an asynchronous one only inside its ``run_sync()``.

        Raises:
            UnusableSession: it cannot ask its database here.
            RecordError, sqlalchemy.exc.DBAPIError: the calls cannot be written.
        """
        self._recorder.write(session)

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """A transaction outside a worker's job, for a body that needs one: inside the caller's
        transaction, if there is one, or of its own. Calls made in it are recorded in it.
        """
        owner = self._owners.open_session()
        if owner is not None:
            # SQLite's driver begins no transaction for a savepoint, whose end commits it then.
            begin_immediate(connection_in(owner, self.tables))
            with self.use(owner), owner.begin_nested():
                yield owner
            return
        with self._body_session() as session, session.begin():
            yield session

    def current_session(self) -> Session | None:
        """The session that calls are recorded in here, if it is one of :meth:`use`."""
        return self._owners.used_session()

    @contextmanager
    def _body_session(self) -> Iterator[Session]:
        """The configured session, or a new one, in which the calls made here are recorded."""
        found = self._owners.body_session()
        if found is None:
            # Objects stay readable after the commit, which is not made by the body.
            with Session(self.engine, expire_on_commit=False) as session, self.use(session):
                yield session
        elif isinstance(found, Session):
            with self.use(found):
                yield found
        else:
            remedy = "a body's transaction needs a SQLAlchemy Session"
            raise UnusableSession(task="(any)", kind=type(found).__name__, remedy=remedy)

    def record_call(
        self,
        task: Task,
        celery_apply_async: Callable[..., AsyncResult],
        args: Sequence[Any] | None,
        kwargs: Mapping[str, Any] | None,
        *,
        task_id: str | None,
        session: Any,
        options: dict[str, Any],
    ) -> AsyncResult:
        """Record a task call; what :meth:`OutboxTask.apply_async` and ``app.send_task`` do."""
        relay = bool(getattr(task, "relayed", False))
        # The key is the worker's, which is not ours.
        template = None if relay else getattr(task, "result_key", None)
        if template is not None:
            # Without a store the job would only fail in the worker.
            _ = self.result_store
        return self._recorder.record_call(
            task,
            celery_apply_async,
            args,
            kwargs,
            task_id=task_id,
            owners=self._owners.of_call(session),
            max_attempts=self.guard.policy_of(task).max_attempts,
            result_key_template=template,
            options=options,
            relay=relay,
        )

    def together(self) -> AbstractContextManager[None]:
        """A block whose calls, as far as they come with no transaction, are recorded in one at its
        end; after an exception, none of them is. Celery's groups and chords are such blocks.

        Raises:
            RecordError, sqlalchemy.exc.DBAPIError: at the end of the block: they cannot be
                recorded.
        """
        return self._batches.together()

    @cached_property
    def _alone(self) -> Alone:
        return Alone(
            self.database,
            require_transaction=self.config.require_transaction,
            timeout=self.config.database_timeout,
        )

    @cached_property
    def _batches(self) -> Batches:
        return Batches(self.tables, self._alone.write)

    @cached_property
    def _recorder(self) -> Recorder:
        return Recorder(
            self.app,
            self.database,
            alone=self._alone,
            batches=self._batches,
            max_payload_size=self.config.max_payload_size,
        )

    @cached_property
    def chord_recorder(self) -> ChordRecorder:
        """Records what a chord is when it is called."""
        return ChordRecorder(
            self.app,
            self.database,
            owners=lambda: self._owners.of_call(None),
            alone=self._alone,
            batches=self._batches,
        )

    # -- the database ------------------------------------------------------------------

    def init(self) -> bool:
        """Make the tables that are missing; safe to repeat.

        Returns:
            Whether any was missing.
        """
        return self.database.init()

    # -- the parts ---------------------------------------------------------------------

    @cached_property
    def guard(self) -> Guard:
        """What stands between Celery's worker and the tasks."""
        return Guard(
            self.app,
            self.config,
            self.database,
            worker_id=lambda: self.worker_id,
            result_store=lambda: self.result_store,
            broker_dead_letters=self.broker_dead_letters,
            body_session=self._body_session,
            open_session=lambda: begun(self._session),
        )

    @cached_property
    def chords(self) -> Chords:
        """Counts the members of chords as they end."""
        return Chords(
            self.app, self.database, use=self.use, database_timeout=self.config.database_timeout
        )

    def dispatcher(self) -> Dispatcher:
        """A new dispatcher; several may run side by side."""
        return Dispatcher(
            self.app,
            self.config,
            self.database,
            quarantine=self.quarantine_queue,
            maintenance=self.maintenance,
        )

    @cached_property
    def maintenance(self) -> Maintenance:
        """Takes back what silent workers hold, and ends what has expired."""
        return Maintenance(
            self.database,
            policy_of=self._policy_of,
            queue_depth=lambda queue: queues.depth(
                self.app, queue, timeout=self.config.publish_timeout
            ),
            republish_after=self.config.republish_after,
            lease=self.config.lease,
            count_members=Bounded(
                Members(self.app, self.chords, after=self.config.lease).count, "members"
            ).run,
            report=Bounded(Reports(self.app, self.database).tell, "reports").run,
        )

    @cached_property
    def control(self) -> Control:
        """Looks at jobs and acts on them, as the command line does."""
        return Control(self.database, is_plain_task=self._tasks.is_plain)

    def job(self, job_id: str) -> JobStatus:
        """Where a job is, what became of it and why.

        Raises:
            UnknownJob: there is none with this id.
        """
        return self.control.status(job_id)

    def cancel(self, job_id: str, *, session: Any = None) -> None:
        """Take a job back that no worker has begun, in the caller's transaction: after a rollback
        it was not cancelled.

        Arguments:
            session: a SQLAlchemy Session or Connection; by default the one of :meth:`use`, or the
                configured one if a transaction has begun in it, or a transaction of its own.

        Raises:
            UnknownJob: there is none with this id.
            WrongState: it is running or has ended.
        """
        self.control.cancel(job_id, self._owners.connection(session, self.tables))

    def revoke(self, task_ids: Sequence[Any], send: Send, *, replies: bool = False) -> Any:
        """Cancel those of many tasks that are jobs and wait, in the caller's transaction, and tell
        after its commit; what ``app.control.revoke`` does.

        Arguments:
            send: tells the workers.
            replies: their answers are asked for.

        Returns:
            The answers of the workers that were told already.
        """
        connection = self._owners.connection(None, self.tables)
        return Revoke(self.app, self.control, send).run(task_ids, connection, replies=replies)

    # -- Celery's side -----------------------------------------------------------------

    def queue(self, name: str, **options: Any) -> Queue:
        """A queue for ``task_queues`` whose rejected messages go to the quarantine queue.

        Arguments:
            name: the queue's name.
            options: arguments of :class:`kombu.Queue`; ``queue_arguments`` are added to ours.
        """
        return queues.outbox_queue(self.app, self._config_so_far(), name, **options)

    @property
    def quarantine_queue(self) -> Queue:
        """Where copies of failed jobs' messages go."""
        return queues.quarantine_queue(self.app, self.config)

    def broker_dead_letters(self, queue: str | None) -> bool:
        """Whether the broker copies rejected messages of ``queue`` to the quarantine queue."""
        return queues.broker_dead_letters(self.app, self.config, queue)

    def beat_schedule(self) -> dict[str, dict[str, Any]]:
        """Entries for ``app.conf.beat_schedule`` that dispatch and maintain without a daemon."""
        from celery_outbox import hooks

        hooks.register_tasks(self.app)
        return hooks.beat_schedule(self._config_so_far())

    def _config_so_far(self) -> Config:
        """The settings as they are now, for what is called while the app is configured."""
        return Config.from_conf(self.app.conf, **self._settings)

    def _policy_of(self, task: str) -> RetryPolicy:
        known = self.app.tasks.get(task)
        return self.config.retry_policy if known is None else self.guard.policy_of(known)

    def _make_engine(self) -> Engine:
        if self._engine is not None:
            return transactional(self._engine)
        if self.config.database_url is not None:
            return open_engine(self.config.database_url)
        bind = getattr(self._session, "get_bind", None)
        if isinstance(self._session, scoped_session) and bind is not None:
            found = bind()
            return transactional(found if isinstance(found, Engine) else found.engine)
        raise ConfigurationError(
            setting="outbox_database_url",
            problem="no database is configured",
            remedy="Set it, or use Outbox(app, engine=...).",
        )


def _together(app: Celery, *, lazy: bool, began: float) -> AbstractContextManager[None]:
    """The block of a canvas; of one that is called eagerly, and so runs now, there is none."""
    if not Outbox.exists(app) or app.conf.task_always_eager:
        return nullcontext()
    return Outbox.of(app)._batches.together(lazy=lazy, began=began)
