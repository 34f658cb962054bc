"""The app that ``celery -A example_project.celery_app`` and the web server use."""

from __future__ import annotations

from example_project import faults
from example_project.configuration import make_celery
from example_project.settings import Settings

settings = Settings.from_environment()
app, outbox = make_celery(settings)

# For the demonstration alone: does nothing unless its variable is set.
faults.arm()
