"""Reads a statement of somebody else's: does it need the calls that are not written yet?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

#: The first word of a statement, behind comments.
_WORD = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*([A-Za-z]+)", re.DOTALL)

#: A comment in a comment: databases do not agree on where it ends.
_NESTED = re.compile(r"/\*(?:(?!\*/).)*/\*", re.DOTALL)

#: Statements that neither end a transaction nor change where rows go. All others, savepoints,
#: SET, DDL and CALL among them, find the calls before them written.
_HARMLESS = frozenset({"SELECT", "INSERT", "UPDATE", "DELETE", "WITH", "VALUES", "MERGE"})

#: Statements that undo what was written since the last savepoint, or all.
_UNDOING = frozenset({"ROLLBACK", "ABORT"})

#: SET as a function (PostgreSQL).
_SETTING = "set_config"

_TEXT = re.compile(r"'([^']*)'")


class Effect(Enum):
    """What a statement is to the calls of its transaction that are not written yet."""

    #: None: they may be written after it.
    NONE = "none"
    #: It may see them, refer to them, commit them, or change where they would go.
    NEEDS_THEM = "needs them"
    #: It undoes them.
    UNDOES_THEM = "undoes them"


class Reader:
    """Reads statements; where it is not sure, they need the calls.

    Arguments:
        tables: names of the outbox tables.
    """

    def __init__(self, tables: Iterable[str]) -> None:
        names = [*tables, _SETTING]
        self._names = re.compile("|".join(map(re.escape, names)), re.IGNORECASE)

    def effect(
        self, statement: str, parameters: Any, *, ids: Collection[str], sqlite: bool
    ) -> Effect:
        """What a statement is to the calls before it.

        Arguments:
            parameters: its parameters: names or positions, of one row or of many.
            ids: of the jobs that the calls ask for.
            sqlite: the database is SQLite.
        """
        word = _first_word(statement)
        if word in _UNDOING:
            return Effect.UNDOES_THEM
        if word == "BEGIN" and sqlite:
            # It cannot begin what a write has begun already.
            return Effect.NONE
        if word == "RELEASE" and not sqlite:
            # SQLite commits where the savepoint has begun the transaction.
            return Effect.NONE
        if word not in _HARMLESS or _is_several(statement) or self._names.search(statement):
            return Effect.NEEDS_THEM
        if any(value in ids for value in (*_TEXT.findall(statement), *_texts(parameters))):
            return Effect.NEEDS_THEM
        return Effect.NONE


def _first_word(statement: str) -> str:
    """In capitals; empty where there is none, or it is not sure."""
    found = _WORD.match(statement)
    if found is None or _NESTED.search(statement[: found.end()]):
        return ""
    return found.group(1).upper()


def _is_several(statement: str) -> bool:
    """Whether this may be more than one statement; a semicolon in a text counts."""
    return ";" in statement.rstrip().rstrip(";")


def _texts(parameters: Any) -> Iterator[str]:
    for value in parameters.values() if isinstance(parameters, Mapping) else parameters or ():
        if isinstance(value, str):
            yield value
        elif isinstance(value, (Mapping, tuple, list)):
            yield from _texts(value)
