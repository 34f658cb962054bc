"""What databases say differently: types, and an insert that leaves alone what is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.compiler import compiles

from celery_outbox.exceptions import TooLargeForDatabase

#: SQLAlchemy's names for MySQL, and for MariaDB by a URL that says so.
MYSQL = ("mysql", "mariadb")

#: "Duplicate entry" (MariaDB and MySQL, error reference).
_DUPLICATE = 1062

#: Most rows of one statement.
_ROWS = 500

#: Bytes of data in one statement of MariaDB and MySQL that nobody has to think about. Their limit
#: is ``max_allowed_packet``, by default 16 MiB and more.
SMALL = 500_000

#: What a statement takes beside its large values, and the name of their character set.
_STATEMENT = 20_000

#: Where MariaDB and MySQL keep a table; each of SQLAlchemy's names for them has its own options.
#: Their usual collations do not tell ``A`` from ``a``.
TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in MYSQL
    for option, value in (
        ("engine", "InnoDB"),
        ("charset", "utf8mb4"),
        ("collate", "utf8mb4_bin"),
    )
}

#: A number that the database gives. SQLite does so only in a column declared INTEGER.
Serial = BigInteger().with_variant(Integer(), "sqlite")

#: Text and bytes of any size; TEXT and BLOB of MariaDB and MySQL end at 64 KiB.
LongText = Text().with_variant(mysql.LONGTEXT(), *MYSQL)
LongBinary = LargeBinary().with_variant(mysql.LONGBLOB(), *MYSQL)


class Name(String):
    """Text of a bounded length that equals only what is the same in every character."""


@compiles(Name)
def _name(name: Name, compiler: Any, **options: Any) -> str:
    return str(compiler.visit_VARCHAR(name, **options))


@compiles(Name, *MYSQL)
def _name_mysql(name: Name, compiler: Any, **options: Any) -> str:
    # The collations of the table's option take "a " and "a" for the same.
    collation = "utf8mb4_nopad_bin" if compiler.dialect.is_mariadb else "utf8mb4_0900_bin"
    return f"VARCHAR({name.length}) CHARACTER SET utf8mb4 COLLATE {collation}"


def random_order(dialect: Dialect) -> ColumnElement[float]:
    """What puts rows in another order each time."""
    return func.rand() if is_mysql(dialect) else func.random()


def is_mysql(dialect: Dialect) -> bool:
    """Whether this is MariaDB or MySQL, which have much in common."""
    return dialect.name in MYSQL


def returns_many(connection: Connection) -> bool:
    """Whether an INSERT of many rows says which it has inserted."""
    dialect = connection.dialect
    return dialect.insert_executemany_returning and not is_mysql(dialect)


def insert_if_absent(connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
    """Insert a row unless its key exists; returns whether it was inserted."""
    if connection.dialect.name == "postgresql":
        # Not the row count: psycopg 3 and others do not keep it for an INSERT.
        key = next(iter(table.primary_key))
        added = postgresql.insert(table).values(**values).on_conflict_do_nothing().returning(key)
        return connection.execute(added).first() is not None
    if is_mysql(connection.dialect):
        return _insert_mysql(connection, table, [values])
    statement = sqlite.insert(table).values(**values).on_conflict_do_nothing()
    return bool(connection.execute(statement).rowcount == 1)


def insert_absent(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
) -> set[Any]:
    """Insert the rows whose key is not there, with few statements on MariaDB and MySQL; returns the
    inserted keys. For databases that do not tell it themselves (:func:`returns_many`).

    Arguments:
        table: one whose key is one column, for which the rows name the value.
        rows: dictionaries with the same keys, values or SQL expressions; no two of them have the
            same key.
    """
    [key] = table.primary_key
    if is_mysql(connection.dialect):
        return _insert_many_mysql(connection, table, rows, key.name)
    # SQLite before 3.35.
    return {row[key.name] for row in rows if insert_if_absent(connection, table, row)}


def _insert_mysql(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> bool:
    if len(rows) == 1:
        check_room(connection, *rows[0].values())
    # INSERT IGNORE would also cut what is too long and drop what a CHECK forbids, and ON DUPLICATE
    # KEY does not tell what it did. A duplicate undoes the statement, and not the transaction.
    try:
        connection.execute(insert(table).values([dict(row) for row in rows]))
    except IntegrityError as error:
        if mysql_code(error.orig) != _DUPLICATE:
            raise
        return False
    return True


def check_room(connection: Connection, *values: Any) -> None:
    """Check that the database takes these values in one statement (MariaDB, MySQL).

    A server that gets more closes the connection, and says nothing that a driver would hear.

    Raises:
        TooLargeForDatabase: it would not.
    """
    large = [value for value in values if isinstance(value, (str, bytes))]
    if not is_mysql(connection.dialect) or sum(map(len, large)) <= SMALL:
        return
    limit = int(connection.scalar(text("SELECT @@max_allowed_packet")))
    # Drivers write two digits for a byte (PyMySQL), or escape it.
    size = 2 * sum(map(len, large))
    if size + _STATEMENT > limit:
        raise TooLargeForDatabase(size=size, limit=limit)


def _insert_many_mysql(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], key: str
) -> set[Any]:
    inserted: set[Any] = set()
    for batch in _batches(rows):
        if not _insert_mysql(connection, table, batch):
            column = table.c[key]
            keys = [row[key] for row in batch]
            # A locking read sees what is committed now, also where the transaction has a snapshot.
            taken = select(column).where(column.in_(keys)).with_for_update(read=True)
            there = set(connection.execute(taken).scalars())
            batch = [row for row in batch if row[key] not in there]
            if batch and not _insert_mysql(connection, table, batch):
                # Another one came in between.
                batch = [row for row in batch if _insert_mysql(connection, table, [row])]
        inserted.update(row[key] for row in batch)
    return inserted


def _batches(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    start = size = 0
    for end, row in enumerate(rows):
        more = sum(len(value) for value in row.values() if isinstance(value, (str, bytes)))
        if end > start and (size + more > SMALL or end - start == _ROWS):
            yield rows[start:end]
            start, size = end, 0
        size += more
    if rows:
        yield rows[start:]


def mysql_code(error: BaseException | None) -> int | None:
    """The number of an error of MariaDB or MySQL, where the error comes from one of its drivers."""
    # PyMySQL and mysqlclient put it first; the others have an attribute.
    first = error.args[0] if error is not None and error.args else None
    found = getattr(error, "errno", first)
    return found if isinstance(found, int) else None
