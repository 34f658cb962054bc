"""Records calls: captures the complete Celery message of ``apply_async`` and writes it into the
caller's transaction. Opens no connection to the broker or the result backend."""
