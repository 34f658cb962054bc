"""What is to be done as soon as somebody else's transaction is committed.

SQLAlchemy announces the commit of a connection before it is made, and says nothing after it. So
the connection's own commit is followed, and the statements that make and undo savepoints.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event

from celery_outbox.log import log_event
from celery_outbox.store.engine import is_autocommit

logger = logging.getLogger("celery_outbox.store")

Work = Callable[[], object]

#: Where SQLAlchemy ends a transaction of a connection, by itself or in two phases.
_COMMITS = ("_commit_impl", "_commit_twophase_impl")

_COMMENTS = r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
_SAVEPOINT = re.compile(
    _COMMENTS + r"(?:(?P<set>SAVEPOINT)"
    r"|(?P<release>RELEASE)(?:\s+SAVEPOINT)?"
    r"|(?P<undo>ROLLBACK|ABORT)(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?"
    r")\s+(?P<name>[^\s;]+)",
    re.DOTALL | re.IGNORECASE,
)
_END = re.compile(
    _COMMENTS + r"(?:(?P<commit>COMMIT|END)|(?P<undo>ROLLBACK|ABORT))\b(?!\s+PREPARED)",
    re.DOTALL | re.IGNORECASE,
)


def after_commit(connection: Connection, work: Work) -> None:
    """Call ``work`` when what was written on a connection is committed: at once in autocommit,
    and never where the transaction, or the savepoint that is open in it, is rolled back.

    Arguments:
        work: is called between two transactions of the connection, which it must not use. Its
            error is logged, since nothing can be undone any more.
    """
    if is_autocommit(connection):
        _call(work)
        return
    later = _of.get(connection)
    if later is None:
        later = _of[connection] = _Later()
        later.follow(connection)
    later.works.append(work)


class _Later:
    """What waits for the commit on one connection."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        #: The savepoints that are open, with the number of works that are older.
        self._savepoints: list[tuple[str, int]] = []

    def follow(self, connection: Connection) -> None:
        """Follow the transactions of a connection from now on."""
        for name in _COMMITS:
            setattr(connection, name, self._followed(getattr(connection, name)))
        for name in ("begin", "begin_twophase", "rollback", "rollback_twophase"):
            event.listen(connection, name, self._forget)
        event.listen(connection, "after_cursor_execute", self._executed)

    def _followed(self, commit: Callable[..., None]) -> Callable[..., None]:
        def followed(*args: Any) -> None:
            commit(*args)
            self._committed()

        return followed

    def _committed(self) -> None:
        works = self.works
        self._forget()
        for work in works:
            _call(work)

    def _forget(self, *rest: Any) -> None:
        self.works, self._savepoints = [], []

    def _executed(self, connection: Connection, cursor: Any, statement: str, *rest: Any) -> None:
        found = _SAVEPOINT.match(statement)
        if found is not None:
            self._moved(found)
            return
        found = _END.match(statement)
        if found is not None:
            # Past SQLAlchemy.
            self._committed() if found["commit"] else self._forget()

    def _moved(self, found: re.Match[str]) -> None:
        name = found["name"].strip('"`').lower()
        if found["set"]:
            self._savepoints.append((name, len(self.works)))
            return
        names = [each for each, _ in self._savepoints]
        if name in names:
            place = len(names) - 1 - names[::-1].index(name)
        elif found["undo"]:
            # It was made before the first work.
            place = 0
            self.works = []
        else:
            return
        if found["undo"] and name in names:
            del self.works[self._savepoints[place][1] :]
            place += 1
        del self._savepoints[place:]


def _call(work: Work) -> None:
    try:
        work()
    except Exception:
        log_event(logger, logging.ERROR, "outbox.after_commit_failed", exc_info=True)


_of: WeakKeyDictionary[Connection, _Later] = WeakKeyDictionary()
