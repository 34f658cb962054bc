"""A package for ``celery -A``, as Celery's "Next steps" has it."""
