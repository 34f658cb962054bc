"""Imported by a worker of an earlier deploy, which does not know a task yet."""

from __future__ import annotations

from tests.acceptance.app import app

app.tasks.unregister("shop.add")
