"""django-celery-outbox's relay: ``python -m benchmarks.programs.django_relay [OPTIONS]``."""

from __future__ import annotations

import sys

from django.core.management import call_command

# Configures Django.
from benchmarks.programs import django_app  # noqa: F401

if __name__ == "__main__":
    call_command("celery_outbox_relay", *sys.argv[1:])
