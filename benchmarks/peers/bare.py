"""Inserts alone, of rows as wide as a recorded call: what a database takes at best."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg2
from sqlalchemy import Column, MetaData, Table, Text, create_engine

from benchmarks.peers.timing import seconds_of
from benchmarks.stage import Place

#: As many bytes as the envelope of a call with two arguments has.
MESSAGE = "x" * 900

_jobs = Table(
    "bare_job",
    MetaData(),
    Column("id", Text, primary_key=True),
    Column("task", Text, nullable=False),
    Column("message", Text, nullable=False),
)


class Caller:
    """A web process that inserts rows by hand."""

    def __init__(self, place: Place) -> None:
        self._engine = create_engine(place.database)
        _jobs.create(self._engine)
        self._connection = psycopg2.connect(place.libpq)
        self.calls_in_transactions(1)
        self.clean()

    def calls_in_transactions(self, count: int) -> float:
        """So many times, with psycopg2 alone: begin, insert, commit."""
        statement = "INSERT INTO bare_job (id, task, message) VALUES (%s, %s, %s)"

        def work() -> None:
            with self._connection.cursor() as cursor:
                for _ in range(count):
                    cursor.execute(statement, (str(uuid.uuid4()), "bench.noop", MESSAGE))
                    self._connection.commit()

        return seconds_of(work)

    def calls_in_one_transaction(self, count: int) -> float:
        """With SQLAlchemy: begin, so many inserts of one row, commit."""

        def work() -> None:
            with self._engine.begin() as connection:
                for _ in range(count):
                    connection.execute(_jobs.insert(), _row())

        return seconds_of(work)

    def bulk(self, count: int) -> float:
        """With SQLAlchemy: begin, one insert of so many rows, commit."""

        def work() -> None:
            with self._engine.begin() as connection:
                connection.execute(_jobs.insert(), [_row() for _ in range(count)])

        return seconds_of(work)

    def clean(self) -> None:
        """Empty the table."""
        with self._connection.cursor() as cursor:
            cursor.execute("TRUNCATE bare_job")
        self._connection.commit()


def _row() -> dict[str, Any]:
    return {"id": str(uuid.uuid4()), "task": "bench.noop", "message": MESSAGE}
