"""Whatever the class of a task is: the request is there, and the guard runs once."""

from __future__ import annotations

from typing import ClassVar
from unittest.mock import MagicMock

import pytest
from celery import Task, _state, shared_task
from celery.app.trace import _install_stack_protection, reset_worker_optimizations
from sqlalchemy.orm import Session

from celery_outbox import Outbox, OutboxTask
from celery_outbox.core.states import State
from celery_outbox.exceptions import ConfigurationError
from celery_outbox.execute.past import warn_of_tasks_past_the_outbox
from celery_outbox.execute.request import OutboxRequest
from tests.factories import add_task, make_app, make_stock_app
from tests.integration.delivering import deliver

#: What the classes below leave behind: (where, the id of the request there).
trace: list[tuple[str, str | None]] = []


class SuperMixin:
    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return super().__call__(*args, **kwargs)


class RunMixin:
    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return self.run(*args, **kwargs)


class StockSuper(Task):
    abstract = True

    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return super().__call__(*args, **kwargs)


class StockRun(Task):
    abstract = True

    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return self.run(*args, **kwargs)


class SuperFirst(SuperMixin, OutboxTask):
    abstract = True


class RunFirst(RunMixin, OutboxTask):
    abstract = True


class StockSuperFirst(StockSuper, OutboxTask):
    abstract = True


class StockRunFirst(StockRun, OutboxTask):
    abstract = True


class StockSuperLast(OutboxTask, StockSuper):
    abstract = True


class StockRunLast(OutboxTask, StockRun):
    abstract = True


class OwnSuper(OutboxTask):
    abstract = True

    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return super().__call__(*args, **kwargs)


class OwnRun(OutboxTask):
    abstract = True

    def __call__(self, *args, **kwargs):
        trace.append(("mixin", self.request.id))
        return self.run(*args, **kwargs)


class Twice(OwnSuper):
    abstract = True

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


BASES = [
    SuperFirst,
    RunFirst,
    StockSuperFirst,
    StockRunFirst,
    StockSuperLast,
    StockRunLast,
    OwnSuper,
    OwnRun,
    Twice,
]


@pytest.fixture(autouse=True)
def no_trace():
    trace.clear()


@pytest.fixture
def in_a_worker():
    """Celery's worker patches ``Task.__call__``, which pushes a request over the real one else."""
    _install_stack_protection()
    yield
    reset_worker_optimizations(make_app())


def body(self, x):
    trace.append(("body", self.request.id))
    return x


@pytest.mark.usefixtures("in_a_worker")
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_a_call_method_of_ones_own_runs_inside_the_guard_with_the_request(
    outbox, recorded, base, transactional
):
    task = add_task(outbox.app, body, base=base, bind=True, transactional=transactional)
    job_id = task.delay(7).id
    assert deliver(task, job_id) == "SUCCESS"
    assert trace == [("mixin", job_id), ("body", job_id)]
    job = recorded.job(job_id)
    assert (job.state, job.attempt, job.result) == (State.SUCCEEDED, 1, b"7")
    assert recorded.events(job_id)[-2:] == ["claimed", "succeeded"]
    assert deliver(task, job_id) == "SUCCESS"
    assert len(trace) == 2


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_a_failure_in_a_call_method_of_ones_own_is_the_attempts(outbox, recorded, base):
    def fail(self, x):
        trace.append(("body", self.request.id))
        raise ValueError

    task = add_task(outbox.app, fail, base=base, bind=True)
    job_id = task.delay(7).id
    assert deliver(task, job_id) == "FAILURE"
    assert recorded.job(job_id).state is State.QUARANTINED
    assert len(trace) == 2


def test_what_a_call_method_does_around_the_body_belongs_to_the_attempt(outbox, recorded):
    class Around(OutboxTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            value = super().__call__(*args, **kwargs)
            if value < 0:
                raise ValueError
            return value * 2

    task = add_task(outbox.app, lambda_body(lambda x: x), base=Around)
    good, bad = task.delay(21).id, task.delay(-1).id
    assert (deliver(task, good), deliver(task, bad)) == ("SUCCESS", "FAILURE")
    assert recorded.job(good).result == b"42"
    assert recorded.job(bad).state is State.QUARANTINED


def lambda_body(function):
    """Name a lambda, which Celery cannot."""
    function.__name__ = "body"
    return function


def test_a_class_that_is_registered_and_its_registered_subclass_are_each_guarded_once(
    outbox, recorded
):
    class First(OutboxTask):
        name = "shop.first"
        transactional = True

        def __call__(self, *args, **kwargs):
            trace.append(("first", self.request.id))
            return super().__call__(*args, **kwargs)

        def run(self, x):
            trace.append(("body", self.request.id))
            assert self.session.in_transaction()
            assert not self.session.in_nested_transaction()
            return x

    class Second(First):
        name = "shop.second"

        def __call__(self, *args, **kwargs):
            trace.append(("second", self.request.id))
            return super().__call__(*args, **kwargs)

    class Third(First):
        name = "shop.third"

    first, second, third = (outbox.app.register_task(cls()) for cls in (First, Second, Third))
    ids = [task.delay(1).id for task in (first, second, third)]
    for task, job_id in zip((first, second, third), ids, strict=True):
        assert deliver(task, job_id) == "SUCCESS"
        assert recorded.job(job_id).attempt == 1
    assert trace == [
        ("first", ids[0]),
        ("body", ids[0]),
        ("second", ids[1]),
        ("first", ids[1]),
        ("body", ids[1]),
        ("first", ids[2]),
        ("body", ids[2]),
    ]
    trace.clear()
    assert second(5) == 5
    assert [where for where, _ in trace] == ["second", "first", "body"]


@pytest.fixture
def shared_tasks_of_one_test():
    """The other apps of this process do not get them."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(before)


@pytest.mark.usefixtures("shared_tasks_of_one_test")
def test_a_shared_task_is_guarded_in_each_app(outbox, recorded):
    # The apps of earlier tests get it, too, while they live.
    name = f"shop.shared_{outbox.engine.dialect.name}"

    @shared_task(name=name, base=RunFirst, bind=True)
    def shared(self, x):
        trace.append(("body", self.request.id))
        return x

    task = outbox.app.tasks[name]
    job_id = task.delay(1).id
    assert deliver(task, job_id) == "SUCCESS"
    assert trace == [("mixin", job_id), ("body", job_id)]
    assert recorded.job(job_id).state is State.SUCCEEDED


def test_an_on_bound_that_does_not_call_ours_changes_nothing(outbox, recorded):
    class Hooked(RunMixin, OutboxTask):
        abstract = True
        seen: ClassVar[list] = []

        @classmethod
        def on_bound(cls, app):
            cls.seen.append(cls.name)

    app = make_app(outbox_database_url=outbox.config.database_url)
    task = add_task(app, body, base=Hooked, bind=True)
    assert Hooked.seen == ["shop.export"]
    assert {step.__name__ for step in app.steps["consumer"]} >= {"KeepPoison"}
    job_id = task.delay(1).id
    assert deliver(task, job_id) == "SUCCESS"
    assert recorded.job(job_id).state is State.SUCCEEDED
    task.outbox.engine.dispose()


def test_an_annotation_may_wrap_the_call_method(outbox, recorded):
    def around(call):
        def wrapped(self, *args, **kwargs):
            trace.append(("annotation", self.request.id))
            return call(self, *args, **kwargs)

        return wrapped

    outbox.app.conf.task_annotations = {"shop.export": {"@__call__": around}}
    task = add_task(outbox.app, body, base=OwnRun, bind=True)
    job_id = task.delay(1).id
    assert deliver(task, job_id) == "SUCCESS"
    assert trace == [("annotation", job_id), ("mixin", job_id), ("body", job_id)]
    assert recorded.job(job_id).state is State.SUCCEEDED


def test_an_apply_async_of_ones_own_records_whichever_way_it_goes_on(outbox, recorded):
    class Tagged(OutboxTask):
        abstract = True

        def apply_async(self, args=None, kwargs=None, **options):
            headers = {**(options.pop("headers", None) or {}), "tenant": "acme"}
            return super().apply_async(args, kwargs, headers=headers, **options)

    class Past(OutboxTask):
        abstract = True

        def apply_async(self, args=None, kwargs=None, **options):
            return Task.apply_async(self, args, kwargs, **options)

    tagged = add_task(outbox.app, body, base=Tagged, bind=True, name="shop.tagged")
    past = add_task(outbox.app, body, base=Past, bind=True, name="shop.past")
    with Session(outbox.engine) as session, outbox.use(session):
        tagged.delay(1)
        past.delay(1)
    assert recorded.counts()[0] == 0
    assert recorded.job(tagged.delay(1).id).envelope.headers["tenant"] == "acme"
    assert recorded.job(past.delay(1).id).state is State.QUEUED


@pytest.mark.parametrize("swapped", [True, False])
def test_a_worker_names_the_tasks_whose_own_base_class_was_forgotten(caplog, swapped):
    class ClassBased(Task):
        name = "shop.class_based"

        def run(self): ...

    app = make_app() if swapped else make_stock_app()
    Outbox(app)
    add_task(app)
    add_task(app, name="shop.meant", base=Task)
    add_task(app, name="shop.adopted", base=type("Adopted", (RunMixin, OutboxTask), {}))
    add_task(app, name="shop.forgotten", base=StockSuper)
    app.register_task(ClassBased())
    app.loader.import_default_modules()
    app.finalize()
    with caplog.at_level("WARNING", logger="celery_outbox"):
        warn_of_tasks_past_the_outbox(app)
    named = [record.outbox_tasks for record in caplog.records]
    assert named == (["shop.class_based,shop.forgotten"] if swapped else [])
    assert not swapped or "celery_outbox.OutboxTask" in caplog.text


class LoggingRequest(OutboxRequest):
    pass


class StockLikeRequest:
    pass


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("Request", "celery.worker.request:Request"),
        ("Request", StockLikeRequest),
        ("Strategy", "tests.integration.test_task_classes:own_strategy"),
        ("__trace__", property(lambda self: None)),
    ],
)
def test_a_class_that_would_get_past_the_guard_is_refused_with_a_remedy(outbox, setting, value):
    class Past(OutboxTask):
        abstract = True

    setattr(Past, setting, value)
    with pytest.raises(ConfigurationError, match=rf"{setting} of task shop\.export") as refused:
        add_task(outbox.app, base=Past)
    assert refused.value.remedy


def test_a_request_class_that_derives_from_ours_is_taken(outbox):
    class Logging(OutboxTask):
        abstract = True
        Request = LoggingRequest

    class ByName(OutboxTask):
        abstract = True
        Request = "tests.integration.test_task_classes:LoggingRequest"

    for number, base in enumerate((Logging, ByName)):
        assert add_task(outbox.app, base=base, name=f"shop.{number}").Request is base.Request


def own_strategy(task, app, consumer, **options):
    return print


def test_a_start_strategy_must_use_ours(outbox):
    class Wraps(OutboxTask):
        abstract = True

        def start_strategy(self, app, consumer, **options):
            trace.append(("strategy", None))
            return super().start_strategy(app, consumer, **options)

    class Past(OutboxTask):
        abstract = True

        def start_strategy(self, app, consumer, **options):
            return print

    consumer = MagicMock(app=outbox.app, hostname="worker", event_dispatcher=None)
    good = add_task(outbox.app, base=Wraps, name="shop.good")
    assert callable(good.start_strategy(outbox.app, consumer))
    assert trace == [("strategy", None)]
    past = add_task(outbox.app, base=Past, name="shop.past")
    with pytest.raises(ConfigurationError, match=r"start_strategy of task shop\.past"):
        past.start_strategy(outbox.app, consumer)
