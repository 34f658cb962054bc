"""Every table and every SQL statement of the package.

Functions here take the caller's connection and never commit it. Where a lease is concerned
the database's clock decides. Each transition of a job is one function, whose condition comes
from :data:`celery_outbox.core.states.TRANSITIONS` and which reports whether it took effect.
"""
