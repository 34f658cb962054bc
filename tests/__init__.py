"""Tests of celery-outbox: ``unit`` needs no server, ``integration`` starts those it needs."""
