"""Write many rows without blocking other writers: many rows per statement, pauses between transactions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from django.db import connection
from django.db.models import Model

ROWS = 1_000  # of a statement
POST_S = 2.0  # of storing one post, by trainers or agents: what is left by then is sent again
REST_S = 0.1  # at most, between two transactions of one request
PARAMETERS = 30_000  # of a statement: SQLite takes 32,766 as it is built by default, PostgreSQL as many as there are


def give_way(since: float) -> None:
    """Rest for as long as the transaction took that began at that monotonic time, before the next one.

    SQLite has one writer and no queue for it: a connection that waits retries every 100 ms in the end, and would hardly
    ever hit the gap between transactions that follow each other at once. On PostgreSQL no writer waits for the rows of
    another attempt.
    """
    if connection.vendor == "sqlite":
        time.sleep(min(time.monotonic() - since, REST_S))


def update_rows(rows: Sequence[Model], fields: Sequence[str]) -> None:
    """Write these fields of the rows as they are now, by `UPDATE … FROM (VALUES …)`.

    Django's `bulk_update` makes a CASE with a branch for each row of each field: SQLite searches it once a row.
    """
    if not rows:
        return
    table = rows[0]._meta
    columns: list[Any] = [table.pk, *(table.get_field(name) for name in fields)]
    names = [connection.ops.quote_name(field.column) for field in columns]
    assigned = ", ".join(f"{name} = v.column{place}" for place, name in enumerate(names[1:], 2))
    quoted = connection.ops.quote_name(table.db_table)
    for some in batches(rows, len(columns)):
        values = ", ".join([_typed(columns), *[f"({', '.join(['%s'] * len(columns))})"] * (len(some) - 1)])
        statement = f"UPDATE {quoted} SET {assigned} FROM (VALUES {values}) AS v WHERE {quoted}.{names[0]} = v.column1"
        with connection.cursor() as cursor:
            cursor.execute(statement, [_prepared(row, field) for row in some for field in columns])


class NewRows:
    """Rows that are prepared before the transaction, so that within it the database is all that takes time.

    Django's `bulk_create` prepares 1,000 jobs of 35 columns in 0.3 s, while everybody else waits.
    """

    def __init__(self, rows: Sequence[Model]) -> None:
        self.rows = rows
        self._fields: list[Any] = (
            [field for field in rows[0]._meta.concrete_fields if not field.primary_key] if rows else []
        )
        self._values = [[self._prepared(row, field) for field in self._fields] for row in rows]

    def point_to(self, field: str, targets: Sequence[Model]) -> None:
        """Let each row's foreign key point to a row that was inserted meanwhile."""
        place = [one.name for one in self._fields].index(field)
        for row, values, target in zip(self.rows, self._values, targets, strict=True):
            setattr(row, field, target)
            values[place] = target.pk

    def insert(self) -> None:
        """Insert the rows, in their order, and give them their primary keys."""
        if not self.rows:
            return
        table, quote = self.rows[0]._meta, connection.ops.quote_name
        names = ", ".join(quote(field.column) for field in self._fields)
        one = f"({', '.join(['%s'] * len(self._fields))})"
        at = 0
        for some in batches(self._values, len(self._fields)):
            statement = (
                f"INSERT INTO {quote(table.db_table)} ({names}) VALUES {', '.join([one] * len(some))}"
                f" RETURNING {quote(str(table.pk.column))}"
            )
            with connection.cursor() as cursor:
                cursor.execute(statement, list(chain.from_iterable(some)))
                for row, (pk,) in zip(self.rows[at : at + len(some)], cursor.fetchall(), strict=True):
                    row.pk, row._state.adding = pk, False
            at += len(some)

    @staticmethod
    def _prepared(row: Model, field: Any) -> Any:
        return field.get_db_prep_save(field.pre_save(row, add=True), connection)


def insert_rows(into: str, rows: Iterable[Sequence[Any]], then: str) -> None:
    """Execute `into` VALUES … `then`, a thousand rows a statement; no row may meet the same conflict twice."""
    rows = list(rows)
    for some in batches(rows, len(rows[0]) if rows else 1):
        values = ", ".join([f"({', '.join(['%s'] * len(some[0]))})"] * len(some))
        with connection.cursor() as cursor:
            cursor.execute(f"{into} VALUES {values} {then}", list(chain.from_iterable(some)))


def batches(rows: Sequence[Any], width: int) -> Iterator[Sequence[Any]]:
    """Yield the rows in slices that fit one statement with `width` parameters a row."""
    step = max(1, min(ROWS, PARAMETERS // width))
    return (rows[at : at + step] for at in range(0, len(rows), step))


def _typed(columns: Sequence[Any]) -> str:
    """Return placeholders of the first row, whose types PostgreSQL takes for the others."""
    if connection.vendor != "postgresql":
        return f"({', '.join(['%s'] * len(columns))})"
    return f"({', '.join(f'%s::{field.rel_db_type(connection) or field.db_type(connection)}' for field in columns)})"


def _prepared(row: Model, field: Any) -> Any:
    return field.get_db_prep_save(getattr(row, field.attname), connection)
