"""An app with a tracing library: ``TRACED_WITH`` is ``sentry`` or ``opentelemetry``.

What the library would send goes into a file, one JSON document a line. The library is set up before
the app is made, as its documentation says.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["TRACED_FOLDER"])
WITH = os.environ["TRACED_WITH"]

#: Names of headers that carry a trace.
TRACE_HEADERS = ("sentry-trace", "baggage", "traceparent")


def write(what: str, **values: Any) -> None:
    """Leave a line; one write, so that processes do not mix theirs."""
    with (FOLDER / "traces").open("a") as file:
        file.write(json.dumps({"what": what, **values}, default=str) + "\n")


def set_up_sentry() -> None:
    """Send errors and transactions to the file."""
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class FileTransport(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            for item in envelope.items:
                event = item.payload.json
                if item.type not in ("event", "transaction") or event is None:
                    continue
                trace = event["contexts"]["trace"]
                write(
                    item.type,
                    name=event.get("transaction"),
                    trace=trace["trace_id"],
                    parent=trace.get("parent_span_id"),
                    error=[each["type"] for each in event.get("exception", {}).get("values", ())],
                    text=json.dumps(event, default=str),
                )

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        transport=FileTransport,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        default_integrations=False,
    )


def set_up_opentelemetry() -> None:
    """Send spans to the file."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class FileExporter(SpanExporter):
        def export(self, spans: Any) -> Any:
            for span in spans:
                write(
                    "span",
                    name=span.name,
                    trace=f"{span.context.trace_id:032x}",
                    span=f"{span.context.span_id:016x}",
                    parent=span.parent and f"{span.parent.span_id:016x}",
                    status=span.status.status_code.name,
                    text=span.to_json(),
                )
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(FileExporter()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


{"sentry": set_up_sentry, "opentelemetry": set_up_opentelemetry}[WITH]()

from celery import Celery  # noqa: E402

from celery_outbox import PermanentError, RetryPolicy  # noqa: E402

app = Celery("shop", broker=os.environ["TRACED_BROKER"], task_cls="celery_outbox:OutboxTask")
app.conf.update(
    outbox_database_url=os.environ["TRACED_DATABASE"],
    outbox_poll_interval=0.1,
    outbox_publish_timeout=5.0,
    broker_connection_retry_on_startup=True,
)


def note(task: Any) -> None:
    """Write down what of a trace the body sees in its request."""
    seen = {name: value for name, value in vars(task.request).items() if name in TRACE_HEADERS}
    write("body", job=task.request.id, headers=seen, current=current_trace())


def current_trace() -> str:
    """The id of the trace that is current here."""
    if WITH == "sentry":
        import sentry_sdk

        span = sentry_sdk.get_current_span()
        return "" if span is None else str(span.trace_id)
    from opentelemetry import trace

    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


class OwnCall(app.Task):
    """A base class with a ``__call__`` of its own."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the body."""
        return super().__call__(*args, **kwargs)


@app.task(bind=True, name="shop.add")
def add(self: Any, x: int, secret: str = "") -> int:
    """Return a result."""
    note(self)
    return x


@app.task(bind=True, name="shop.own", base=OwnCall)
def own(self: Any, x: int) -> int:
    """Return a result, called by a class of the user's."""
    note(self)
    return x


@app.task(bind=True, name="shop.refuse")
def refuse(self: Any) -> None:
    """Fail for good."""
    note(self)
    raise PermanentError("refused")


@app.task(bind=True, name="shop.flaky", retry_policy=RetryPolicy(3, delay=0.05, jitter=0))
def flaky(self: Any) -> int:
    """Fail once."""
    note(self)
    if self.request.retries == 0:
        raise ConnectionError("once")
    return 1


def call() -> None:
    """Make calls of every kind within one trace, and write down which it is."""
    if WITH == "sentry":
        import sentry_sdk

        with sentry_sdk.start_transaction(name="caller"):
            write("caller", trace=current_trace())
            _call()
        sentry_sdk.flush()
        return
    from opentelemetry import trace

    with trace.get_tracer("caller").start_as_current_span("caller"):
        write("caller", trace=current_trace())
        _call()


def _call() -> None:
    add.apply_async((1, "s3cret"), task_id="call-1")
    add.signature((2,), task_id="signature-1").apply_async()
    app.send_task("shop.add", (3,), task_id="name-1")
    add.apply_async((4,), task_id="headers-1", headers={"tenant": "7"})
    add.apply_async((5,), task_id="link-1", link=add.si(6).set(task_id="linked-1"))
    own.apply_async((7,), task_id="own-1")
    flaky.apply_async(task_id="flaky-1")
    refuse.apply_async(task_id="refuse-1")
