"""A Django project with django-celery-outbox: settings, Celery app and tasks in one module."""

from __future__ import annotations

import logging
import os

import django
import structlog
from django.conf import settings
from django_celery_outbox import OutboxCelery
from sqlalchemy import make_url

# Its lines for each batch would go to the terminal.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
_url = make_url(os.environ["BENCH_DATABASE"])
settings.configure(
    SECRET_KEY="benchmark",
    USE_TZ=True,
    INSTALLED_APPS=["django_celery_outbox"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    CELERY_OUTBOX_APP="benchmarks.programs.django_app.app",
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": _url.database,
            "USER": _url.username or "",
            "PASSWORD": _url.password or "",
            "HOST": _url.host,
            "PORT": _url.port,
            # Connections are kept, as its documentation of the relay takes for granted.
            "CONN_MAX_AGE": None,
        }
    },
)
app = OutboxCelery("bench", broker=os.environ["BENCH_BROKER"], set_as_current=False)
# Without it a message that the broker lost would count as published.
app.conf.broker_transport_options = {"confirm_publish": True}
app.conf.task_ignore_result = True
django.setup()


@app.task(name="bench.noop")
def noop(number: int, period: str) -> None:
    """Be called by its name, in a stock worker."""


@app.task(name="bench.stamp")
def stamp(number: int, period: str) -> None:
    """Be called by its name, in a stock worker."""
