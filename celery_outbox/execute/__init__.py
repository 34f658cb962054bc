"""Runs jobs in the worker: claim, decide, run, settle; then Celery acknowledges."""
