"""Celery apps and workers that run in processes of their own, told by the environment where."""
