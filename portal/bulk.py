"""Write many rows without blocking other writers: many rows per statement, pauses between transactions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from django.db import connection
from django.db.models import Model

ROWS = 1_000  # per statement on SQLite
ARRAY_ROWS = 10_000  # per statement on PostgreSQL, which gets an array per column
POST_S = 2.0  # for storing one post of trainers or agents: what is left by then is sent again
REST_S = 0.1  # at most, between two transactions of one request
PARAMETERS = 30_000  # per statement on SQLite, whose default build takes 32,766
KEYS_PER_QUERY = 500  # in `IN (…)`, so that statements stay short
T = TypeVar("T")


def give_way(since: float) -> None:
    """Pause before the next transaction, for as long as the one took that began at `since` (monotonic seconds).

    SQLite has one writer and no queue for it: a waiting connection ends up retrying every 100 ms, and would hardly ever
    hit the gap between transactions that follow each other immediately. On PostgreSQL no writer waits for the rows of
    another attempt.
    """
    if connection.vendor == "sqlite":
        time.sleep(min(time.monotonic() - since, REST_S))


def update_rows(rows: Sequence[Model], fields: Sequence[str]) -> None:
    """Write the rows' current values of these fields, by `UPDATE … FROM` a table of values.

    Django's `bulk_update` makes a CASE with a branch per row for each field: SQLite searches it once per row.
    """
    if not rows:
        return
    table = rows[0]._meta
    columns: list[Any] = [table.pk, *(table.get_field(name) for name in fields)]
    names = [_quote(field.column) for field in columns]
    assigned = ", ".join(f"{name} = v.column{place}" for place, name in enumerate(names[1:], 2))
    quoted = _quote(table.db_table)
    for some in batches(rows, len(columns)):
        values = [[_prepared(field, getattr(row, field.attname)) for field in columns] for row in some]
        source, parameters = _table_of(columns, values)
        statement = f"UPDATE {quoted} SET {assigned} FROM {source} WHERE {quoted}.{names[0]} = v.column1"
        with connection.cursor() as cursor:
            cursor.execute(statement, parameters)


class NewRows:
    """Rows that are prepared before the transaction, so that within it only the database takes time.

    Django's `bulk_create` prepares 1,000 jobs of 35 columns in 0.3 s, while everybody else waits.
    """

    def __init__(self, rows: Sequence[Model]) -> None:
        self.rows = rows
        self._fields: list[Any] = (
            [field for field in rows[0]._meta.concrete_fields if not field.primary_key] if rows else []
        )
        self._values = [[_prepared(field, field.pre_save(row, add=True)) for field in self._fields] for row in rows]

    def reserve_keys(self) -> bool:
        """Assign primary keys before the transaction, if the database supports that; return whether it does.

        Rows that refer to each other then need no second statement.
        """
        if not self.rows or connection.vendor != "postgresql":
            return False
        key = type(self.rows[0])._meta.pk
        with connection.cursor() as cursor:
            statement = "SELECT nextval(pg_get_serial_sequence(%s, %s)) FROM generate_series(1, %s)"
            cursor.execute(statement, [_quote(key.model._meta.db_table), key.column, len(self.rows)])
            for row, values, (pk,) in zip(self.rows, self._values, cursor.fetchall(), strict=True):
                row.pk = pk
                values.append(pk)
        self._fields = [*self._fields, key]
        return True

    def point_to(self, field: str, targets: Sequence[Model]) -> None:
        """Set each row's foreign key to the matching row of `targets`, inserted in the meantime."""
        place = [model_field.name for model_field in self._fields].index(field)
        for row, values, target in zip(self.rows, self._values, targets, strict=True):
            setattr(row, field, target)
            values[place] = target.pk

    def insert(self) -> None:
        """Insert the rows in order, and set their primary keys."""
        if not self.rows:
            return
        model, at = type(self.rows[0]), 0
        into, returning = _insert_into(model, self._fields), f"RETURNING {_quote(str(model._meta.pk.column))}"
        for some in batches(self._values, len(self._fields)):
            source, parameters = _table_of(self._fields, some)
            with connection.cursor() as cursor:
                cursor.execute(f"{into} SELECT * FROM {source} WHERE true {returning}", parameters)
                for row, (pk,) in zip(self.rows[at : at + len(some)], cursor.fetchall(), strict=True):
                    row.pk, row._state.adding = pk, False
            at += len(some)


def insert_rows(model: type[Model], names: Sequence[str], rows: Iterable[Sequence[Any]], then: str = "") -> None:
    """Insert rows of plain values for these fields; `then` (ON CONFLICT …) settles conflicts with existing rows.

    No two rows may have the same conflict.
    """
    fields: list[Any] = [model._meta.get_field(name) for name in names]
    into, rows = _insert_into(model, fields), list(rows)
    for some in batches(rows, len(fields)):
        source, parameters = _table_of(fields, some)
        with connection.cursor() as cursor:
            cursor.execute(f"{into} SELECT * FROM {source} WHERE true {then}", parameters)


def _insert_into(model: type[Model], fields: Sequence[Any]) -> str:
    return f"INSERT INTO {_quote(model._meta.db_table)} ({', '.join(_quote(field.column) for field in fields)})"


def _quote(name: str) -> str:
    return connection.ops.quote_name(name)


def _table_of(fields: Sequence[Any], rows: Sequence[Sequence[Any]]) -> tuple[str, list[Any]]:
    """Return these rows as a table v (column1, column2, …) of a FROM clause, and the statement's parameters.

    PostgreSQL gets an array per column: 30,000 single values take both sides several times as long.
    """
    if connection.vendor == "postgresql":
        columns = [_column_of(field, column) for field, column in zip(fields, zip(*rows, strict=True), strict=True)]
        names = ", ".join(f"column{place}" for place in range(1, len(fields) + 1))
        return f"ROWS FROM ({', '.join(sql for sql, _ in columns)}) AS v({names})", [values for _, values in columns]
    row_placeholder = f"({', '.join(['%s'] * len(fields))})"
    return f"(VALUES {', '.join([row_placeholder] * len(rows))}) AS v", list(chain.from_iterable(rows))


def _column_of(field: Any, values: Sequence[Any]) -> tuple[str, Any]:
    """Return an SQL expression for PostgreSQL that yields a column's values, and its parameter.

    JSON is sent as one JSON array where possible: in a PostgreSQL array each of its quotation marks is escaped.
    """
    kind = str(field.rel_db_type(connection) or field.db_type(connection))
    if kind == "jsonb" and None not in values:
        return "jsonb_array_elements(%s::jsonb)", f"[{','.join(values)}]"
    # Without the type's length: a cast would cut values that are too long, while an assignment fails.
    return f"unnest(%s::{kind.partition('(')[0]}[])", list(values)


def batches(rows: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield the rows in slices that fit one statement with `width` parameters a row."""
    return chunks(rows, ARRAY_ROWS if connection.vendor == "postgresql" else max(1, min(ROWS, PARAMETERS // width)))


def chunks(items: Sequence[T], size: int = KEYS_PER_QUERY) -> Iterator[Sequence[T]]:
    """Yield the items in slices of at most `size`."""
    return (items[at : at + size] for at in range(0, len(items), size))


def _prepared(field: Any, value: Any) -> Any:
    """Return a value as the database takes it: JSON as text, which psycopg would encode only within the transaction."""
    found = field.get_db_prep_save(value, connection)
    return json.dumps(found.obj, cls=field.encoder) if hasattr(found, "obj") else found
