"""The tables that synchronize chords."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Integer, MetaData, Table, text

from celery_outbox.core.chords import ChordState
from celery_outbox.store.clock import UTCDateTime, db_now
from celery_outbox.store.dialects import TABLE_OPTIONS, LongBinary, LongText, Name
from celery_outbox.store.partial import partial_index


def chord_table(meta: MetaData, prefix: str, schema: str | None) -> Table:
    """One row per chord; its id is the id of the header's group."""
    states = ", ".join(f"'{state}'" for state in ChordState)
    return Table(
        f"{prefix}chord",
        meta,
        Column("id", Name(255), primary_key=True),
        Column("state", Name(16), nullable=False, server_default=text("'open'")),
        # Members of the header; NULL until the last of them is about to be recorded.
        Column("size", Integer),
        # Members that have ended: what is looked at each time, so the parts need not be counted.
        Column("counted", Integer, nullable=False, server_default=text("0")),
        # Ids of the results as they are nested, where the header has groups inside; JSON.
        Column("structure", LongText),
        # The body's signature, for members that end without a worker.
        Column("body", LongBinary),
        Column("body_type", Name(255)),
        Column("recorded_at", UTCDateTime, nullable=False, default=db_now()),
        Column("finished_at", UTCDateTime),
        CheckConstraint(f"state IN ({states})", name=f"{prefix}chord_state"),
        CheckConstraint("(state = 'open') = (finished_at IS NULL)", name=f"{prefix}chord_finished"),
        schema=schema,
        **TABLE_OPTIONS,
    )


def part_table(meta: MetaData, prefix: str, schema: str | None) -> Table:
    """One row per member of a header that has ended, or that is known before it is recorded."""
    # No foreign keys: a body that adds members would hold the chord's row, for whose lock the
    # members that end wait.
    table = Table(
        f"{prefix}chord_part",
        meta,
        Column("chord_id", Name(255), primary_key=True),
        Column("job_id", Name(255), primary_key=True),
        Column("position", Integer, primary_key=True, autoincrement=False),
        # NULL: not ended.
        Column("state", Name(16)),
        # It was added to a header whose size was fixed before (add_to_chord).
        Column("extra", Integer, nullable=False, server_default=text("0")),
        # What the body gets of it: its result, or the exception.
        Column("result", LongBinary),
        Column("result_type", Name(255)),
        CheckConstraint(
            "state IS NULL OR state IN ('succeeded', 'failed')", name=f"{prefix}chord_part_state"
        ),
        schema=schema,
        **TABLE_OPTIONS,
    )
    partial_index(f"ix_{prefix}chord_part_waiting", "state IS NULL", table.c.job_id)
    return table
