"""Which statements need the calls of their transaction that are not written yet."""

from __future__ import annotations

from typing import Any

import pytest

from celery_outbox.store.statements import Effect, Reader

NONE, NEEDS_THEM, UNDOES_THEM = Effect.NONE, Effect.NEEDS_THEM, Effect.UNDOES_THEM

IDS = {"0a1b", "2c3d"}


def read(statement: str, parameters: Any = (), *, sqlite: bool = False) -> Effect:
    reader = Reader(["outbox_job", "outbox_message"])
    return reader.effect(statement, parameters, ids=IDS, sqlite=sqlite)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT 1",
        "select 1;",
        "  SELECT 1 ; \n",
        "INSERT INTO orders VALUES (?)",
        "UPDATE orders SET id = 2",
        "DELETE FROM orders",
        "WITH some AS (SELECT 1) SELECT * FROM some",
        "VALUES (1)",
        "MERGE INTO orders USING others ON true WHEN MATCHED THEN DO NOTHING",
        "-- a comment\nSELECT 1",
        "/* COMMIT */ SELECT 1",
        "/* one */ -- two\n /* three */ INSERT INTO orders VALUES (1)",
    ],
)
def test_what_is_about_other_things_does_not(statement):
    assert read(statement) is NONE


@pytest.mark.parametrize(
    "statement",
    [
        "COMMIT",
        "commit",
        "END",
        "PREPARE TRANSACTION 'a'",
        "SAVEPOINT a",
        "BEGIN",
        "START TRANSACTION",
        "SET search_path TO other",
        "SELECT set_config('search_path', 'other', true)",
        "CALL ends_it()",
        "DO $$ BEGIN COMMIT; END $$",
        "CREATE TABLE orders (id int)",
        "LOCK TABLES orders WRITE",
        "EXECUTE prepared",
        "REPLACE INTO orders VALUES (1)",
        "XA END 'a'",
        "SELECT 1; COMMIT",
        "INSERT INTO orders VALUES (1);COMMIT;",
        "-- a comment\nCOMMIT",
        "/* SELECT */ COMMIT",
        "# a comment of MySQL\nCOMMIT",
        "/*! COMMIT */",
        "/* a /* comment */ ROLLBACK */ COMMIT",
        "(SELECT 1)",
        "",
        "-- nothing",
    ],
)
@pytest.mark.parametrize("sqlite", [False, True])
def test_what_may_commit_or_change_where_rows_go_does(statement, sqlite):
    if statement == "BEGIN" and sqlite:
        # A write would have begun the transaction.
        assert read(statement, sqlite=True) is NONE
    else:
        assert read(statement, sqlite=sqlite) is NEEDS_THEM


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM outbox_job",
        'SELECT * FROM "Outbox_Job"',
        "INSERT INTO orders SELECT id FROM shop.outbox_message",
        "SELECT 1 -- outbox_job",
    ],
)
def test_what_names_a_table_of_the_outbox_does(statement):
    assert read(statement) is NEEDS_THEM


@pytest.mark.parametrize(
    ("parameters", "effect"),
    [
        (("0a1b",), NEEDS_THEM),
        ({"job": "2c3d"}, NEEDS_THEM),
        ([("x", 1), ("y", "2c3d")], NEEDS_THEM),
        ([{"job": "x"}, {"job": "0a1b"}], NEEDS_THEM),
        ({"jobs": ["x", ["0a1b"]]}, NEEDS_THEM),
        (("0a1", 1, None, b"0a1b"), NONE),
        (None, NONE),
        ({}, NONE),
    ],
)
def test_what_has_the_id_of_a_call_among_its_parameters_does(parameters, effect):
    assert read("INSERT INTO orders VALUES (?)", parameters) is effect


def test_what_has_the_id_of_a_call_in_its_text_does():
    assert read("INSERT INTO orders VALUES ('x', '2c3d')") is NEEDS_THEM
    assert read("INSERT INTO orders VALUES ('x', '2c3')") is NONE


@pytest.mark.parametrize(
    "statement", ["ROLLBACK", "rollback to savepoint a", "ABORT", "/* a */ ROLLBACK AND CHAIN"]
)
def test_what_undoes_them(statement):
    assert read(statement) is UNDOES_THEM


def test_the_end_of_a_savepoint_is_a_commit_on_sqlite_alone():
    assert read("RELEASE SAVEPOINT a") is NONE
    assert read("RELEASE SAVEPOINT a", sqlite=True) is NEEDS_THEM
