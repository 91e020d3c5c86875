"""Write a table's rows at once, without its indexes and references, which are created afterwards from all rows.

A database then sorts once, where it would otherwise find a place for each row in each index. References are created or
checked with all rows present: one that leads nowhere fails the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

_INDEXES = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL AND tbl_name IN ({tables})",
    "postgresql": """
        SELECT i.indexname, i.indexdef FROM pg_indexes i WHERE i.tablename IN ({tables})
        AND NOT EXISTS (SELECT 1 FROM pg_constraint c WHERE c.conindid = to_regclass(quote_ident(i.indexname)))""",
}
# References first: they need what is unique there, and no other index.
_CONSTRAINTS = """
    SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint
    WHERE conrelid IN (SELECT to_regclass(name) FROM unnest(ARRAY[{tables}]) name) AND contype IN ('f', 'u')
    ORDER BY contype"""


@contextmanager
def writing(connection: BaseDatabaseWrapper, kinds: Sequence[type[models.Model]]) -> Iterator[Any]:
    """Yield a cursor to write these tables with; indexes and references are created when the block ends.

    If the block fails they are missing. It is not one transaction: SQLite would search for every page of one
    through all that it has written so far.
    """
    tables = [kind._meta.db_table for kind in kinds]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            with connection.constraint_checks_disabled(), _without_indexes(cursor, connection.vendor, tables):
                yield cursor
            connection.check_constraints(tables)
            return
        cursor.execute("SET maintenance_work_mem = '256MB'")
        with _without_constraints(cursor, tables), _without_indexes(cursor, connection.vendor, tables):
            yield cursor
        cursor.execute("RESET maintenance_work_mem")


@contextmanager
def _without_indexes(cursor: Any, vendor: str, tables: Sequence[str]) -> Iterator[None]:
    cursor.execute(_INDEXES[vendor].format(tables=", ".join(f"'{table}'" for table in tables)))
    indexes = cursor.fetchall()
    for name, _ in indexes:
        cursor.execute(f'DROP INDEX "{name}"')
    yield
    for _, made in indexes:
        cursor.execute(made)


@contextmanager
def _without_constraints(cursor: Any, tables: Sequence[str]) -> Iterator[None]:
    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # what waits for the end of the transaction holds the tables
    cursor.execute(_CONSTRAINTS.format(tables=", ".join(f"'{table}'" for table in tables)))
    constraints = cursor.fetchall()
    for table, name, _ in constraints:
        cursor.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{name}"')
    yield
    for table, name, made in reversed(constraints):
        cursor.execute(f'ALTER TABLE {table} ADD CONSTRAINT "{name}" {made}')


def insert(cursor: Any, like: models.Model, differs: Mapping[str, str], source: str) -> None:
    """Insert a row like the instance for each line of the source, in order of its column i, with these changes."""
    columns, values, params = [], [], []
    for field in like._meta.concrete_fields:
        if field.attname in differs:
            values.append(differs[field.attname])
        elif field.primary_key:
            continue
        else:
            values.append("%s")
            params.append(field.get_db_prep_save(field.pre_save(like, add=False), cursor.db))
        columns.append(f'"{field.column}"')
    text = (
        f"INSERT INTO {like._meta.db_table} ({', '.join(columns)}) SELECT {', '.join(values)} FROM {source} ORDER BY i"
    )
    cursor.execute(text, params)


def time_of(column: str, vendor: str) -> str:
    """Return SQL for seconds since 1970 in the form in which the database stores times."""
    return f"to_timestamp({column})" if vendor == "postgresql" else f"datetime({column}, 'unixepoch')"


def count_on(connection: BaseDatabaseWrapper, kinds: Sequence[type[models.Model]], number: int) -> None:
    """Continue PostgreSQL's sequence of ids, which does not notice ids that were given explicitly."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            for kind in kinds:
                table = kind._meta.db_table
                most = f"(SELECT GREATEST(max(id), {number}) FROM {table})"
                cursor.execute(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {most})")


def settle(connection: BaseDatabaseWrapper) -> None:
    """Do now what the database would do by itself within minutes after so many rows."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql" and not connection.in_atomic_block:
            cursor.execute("VACUUM ANALYZE")
        elif connection.vendor == "sqlite" and not connection.in_atomic_block:
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
