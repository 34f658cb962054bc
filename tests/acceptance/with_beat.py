"""The app with the outbox's entries in its beat schedule, where no daemon is wanted."""

from __future__ import annotations

from tests.acceptance.app import app, outbox

app.conf.beat_schedule = outbox.beat_schedule()
