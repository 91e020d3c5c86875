"""Find a page of jobs, and count them, at a cost that does not grow with the number of jobs ever submitted.

few     a filter gives at most MAX_COUNTED jobs according to an index: they are read, sorted and counted exactly
plain   only projects and states are restricted: the page is a range of an index, or merged from several ranges
scan    else the order's index is scanned, checking each row; common filters fill a page within few rows
words   if a scan found too little, the index of names tells whether a word is rare: then its jobs are few
short   else the page ends after MAX_SCANNED_ROWS, full or not, and its cursor says where to continue
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from django.db import connection

from jobs.listing.filters import JobQuery, dialect, in_list, with_conditions
from jobs.listing.sql import Sql
from jobs.models import Attempt

MAX_COUNTED = 10_000
"""Up to this many jobs are counted and sorted; beyond that the page says that there are more."""
MAX_SCANNED_ROWS = 10_000
"""Rows that a scan reads before it stops and offers to continue."""
ROWS_BEFORE_INDEX_LOOKUP = 2_000
"""Rows that it reads before it looks up a word in the index, which is slower for words in most names."""
_MAX_RANGES = 200  # index pages combined in one statement; SQLite allows 500
_COLUMNS = {"name": "name", "state": "state", "started": "started_at", "ended": "ended_at"}
_GROUPS = {"project": ("project_id", "portal_project", "slug"), "owner": ("owner_id", "portal_user", "username")}

Place = tuple[Any, int]
"""Position of a row in an order: its sort value (None if sorted by id), and its id."""


@dataclass(frozen=True)
class Count:
    """A number of jobs, exact or a lower bound."""

    number: int
    more: bool = False

    def __add__(self, other: Count) -> Count:
        return Count(self.number + other.number, self.more or other.more)

    def __bool__(self) -> bool:
        return self.number > 0 or self.more

    def __str__(self) -> str:
        return f"{_rounded(self.number):,}+" if self.more else f"{self.number:,}"


def _rounded(number: int) -> int:
    """Round down to the first digit: in a partial count the other digits mean nothing."""
    step = int(10 ** (len(str(number)) - 1))
    return number // step * step


@dataclass(frozen=True)
class FoundPlaces:
    """The places of a page, and the place after which the next page begins; None if there are no more."""

    places: list[Place]
    next: Place | None


@dataclass
class Finder:
    """A person's search in one order: its pages, and its counts by state."""

    query: JobQuery
    sort: str
    descending: bool
    _is_common: bool = False  # the page was filled quickly: no need to look up its words to count

    def page(self, after: Place | None, limit: int) -> FoundPlaces:
        if self.query.is_impossible:
            return FoundPlaces([], None)
        with connection.cursor() as cursor, dialect().by_index(cursor):
            if self._needs_ranges_only:
                return self._merged_ranges(cursor, after, limit)
            if (few := self._few(cursor, states=True)) is not None:
                return self._sorted(cursor, few, after, limit)
            if not self.query.words:
                return self._scan(cursor, after, limit, MAX_SCANNED_ROWS)
            scanned = self._scan(cursor, after, limit, ROWS_BEFORE_INDEX_LOOKUP)
            if scanned.next is None or len(scanned.places) == limit:
                self._is_common = True
                return scanned
        if self._rare is None:
            with connection.cursor() as cursor, dialect().by_index(cursor):
                return self._scan(cursor, after, limit, MAX_SCANNED_ROWS)
        with connection.cursor() as cursor, dialect().by_index(cursor):
            return self._sorted(cursor, self._rare, after, limit)

    def counts(self) -> dict[str, Count]:
        """Return the number of jobs by state, ignoring the filter on states."""
        if self.query.scope == [] or self.query.owner == -1:
            return {}
        with connection.cursor() as cursor, dialect().by_index(cursor):
            if self.query.is_plain:
                return self._counts_by_index(cursor)
            if (few := self._few(cursor, states=False)) is not None:
                return self._counts_of(cursor, few)
            if self._is_common or not self.query.words:
                return self._counts_of_scan(cursor)
        rare = self._rare
        with connection.cursor() as cursor, dialect().by_index(cursor):
            return self._counts_of_scan(cursor) if rare is None else self._counts_of(cursor, rare)

    # Few

    def _few(self, cursor: Any, *, states: bool) -> Sql | None:
        """Return the source with the fewest jobs, if these are no more than MAX_COUNTED."""
        sources = self.query.candidates(states=states)
        if not sources:
            return None
        counts = self._measured(cursor, sources)
        at = min(range(len(sources)), key=counts.__getitem__)
        return sources[at] if counts[at] <= MAX_COUNTED else None

    @cached_property
    def _rare(self) -> Sql | None:
        """Return the jobs of the rarest word, if at most MAX_COUNTED: looked up once, then used by id."""
        sources = [source for word in self.query.words if (source := word.source) is not None]
        most, fewest = MAX_COUNTED, None
        if sources:
            with connection.cursor() as cursor, dialect().by_index(cursor, bitmaps=True):
                for source in sources:
                    some = f"SELECT * FROM ({source.text.format(most=most + 1)}) s LIMIT {most + 1}"
                    cursor.execute(
                        f"SELECT {dialect().AGGREGATED_IDS.format(most=most)} FROM ({some}) s", source.params
                    )
                    count, packed_ids = cursor.fetchone()
                    if packed_ids is not None:
                        most, fewest = count, packed_ids
        return None if fewest is None else Sql(dialect().UNPACKED_IDS, (fewest,))

    def _measured(self, cursor: Any, sources: Sequence[Sql]) -> list[int]:
        text = " UNION ALL ".join(
            f"SELECT {at} AS n, count(*) FROM (SELECT * FROM ({source.text}) s LIMIT {MAX_COUNTED + 1}) c"
            for at, source in enumerate(sources)
        )
        cursor.execute(text, [value for source in sources for value in source.params])
        found = dict(cursor.fetchall())
        return [found[at] for at in range(len(sources))]

    def _sorted(self, cursor: Any, source: Sql, after: Place | None, limit: int) -> FoundPlaces:
        table = ""
        if self.sort in _GROUPS:
            key, name, column = _GROUPS[self.sort]
            table, value = f" JOIN {name} g ON g.id = l.{key}", f"g.{column}"
        else:
            value = f"l.{_COLUMNS.get(self.sort, 'id')}"
        head = f"SELECT l.id, {value} FROM ({source.text} LIMIT {MAX_COUNTED + 1}) d {dialect().JOIN}{table}"
        where = [*self.query.conditions(), *self._after_cursor(after, value, "l.id")]
        statement = with_conditions(head, where, self._order_by(value, "l.id", limit + 1))
        cursor.execute(statement.text, [*source.params, *statement.params])
        return self._to_page([(place, pk) for pk, place in cursor.fetchall()], limit)

    def _counts_of(self, cursor: Any, source: Sql) -> dict[str, Count]:
        head = f"SELECT l.state, count(*) FROM ({source.text} LIMIT {MAX_COUNTED + 1}) d {dialect().JOIN}"
        found = with_conditions(head, self.query.conditions(states=False), " GROUP BY l.state")
        cursor.execute(found.text, [*source.params, *found.params])
        return {state: Count(count) for state, count in cursor.fetchall() if state}

    # Plain

    @property
    def _needs_ranges_only(self) -> bool:
        """Return whether the page is the start of a few index ranges that need no further filtering."""
        if not self.query.is_plain or self.sort in _GROUPS:
            return False
        by_state = self.query.states is None or self.sort == "created"
        return by_state and len(self._equals) <= _MAX_RANGES

    @cached_property
    def _equals(self) -> list[list[Sql]]:
        scopes = [None] if self.query.scope is None else self.query.scope
        states = [None] if self.query.states is None else self.query.states
        return [
            [
                *([] if scope is None else [Sql("project_id = %s", (scope,))]),
                *([] if state is None else [Sql("state = %s", (state,))]),
            ]
            for scope in scopes
            for state in states
        ]

    def _merged_ranges(self, cursor: Any, after: Place | None, limit: int) -> FoundPlaces:
        column = _COLUMNS.get(self.sort, "id")
        parts = [
            with_conditions(
                f"SELECT id, {column} AS place FROM jobs_listing",
                [*equals, *self._after_cursor(after, column, "id")],
                self._order_by(column, "id", limit + 1),
            )
            for equals in self._equals
        ]
        text = " UNION ALL ".join(f"SELECT * FROM ({part.text}) s" for part in parts)
        text = f"SELECT id, place FROM ({text}) u{self._order_by('place', 'id', limit + 1)}"
        cursor.execute(text, [value for part in parts for value in part.params])
        return self._to_page([(place, pk) for pk, place in cursor.fetchall()], limit)

    def _counts_by_index(self, cursor: Any) -> dict[str, Count]:
        parts = []
        for state in Attempt.State.values:
            where = [Sql("state = %s", (state,))]
            if self.query.scope is not None:
                where.append(in_list("project_id", self.query.scope))
            parts.append(with_conditions("SELECT state FROM jobs_listing", where, f" LIMIT {MAX_COUNTED + 1}"))
        text = " UNION ALL ".join(f"SELECT max(state), count(*) FROM ({part.text}) s" for part in parts)
        cursor.execute(text, [value for part in parts for value in part.params])
        return {state: _bounded(count) for state, count in cursor.fetchall() if state}

    # Scan

    def _scan(self, cursor: Any, after: Place | None, limit: int, max_rows: int) -> FoundPlaces:
        if self.sort not in _GROUPS:
            return self._scan_index(cursor, [], after, limit, max_rows)
        return self._scan_groups(cursor, after, limit, max_rows)

    def _scan_index(self, cursor: Any, equal: list[Sql], after: Place | None, limit: int, max_rows: int) -> FoundPlaces:
        """Scan one index until the page is full or `max_rows` rows have been checked."""
        column = "id" if self.sort in _GROUPS else _COLUMNS.get(self.sort, "id")
        inner = self._inner(equal, after, column, f" LIMIT {max_rows}")
        # Already ordered inside: with another ORDER BY the databases would read everything before the first row.
        statement = with_conditions(
            f"SELECT l.id, l.{column} FROM ({inner.text}) l", self.query.conditions(), f" LIMIT {limit + 1}"
        )
        cursor.execute(statement.text, [*inner.params, *statement.params])
        rows = [(place, pk) for pk, place in cursor.fetchall()]
        if len(rows) > limit:
            return self._to_page(rows, limit)
        last = self._inner(equal, after, column, f" LIMIT 1 OFFSET {max_rows - 1}", f"id, {column}")
        cursor.execute(last.text, last.params)
        end = cursor.fetchone()
        return FoundPlaces([self._place(*row) for row in rows], self._place(end[1], end[0]) if end else None)

    def _inner(self, equal: list[Sql], after: Place | None, column: str, tail: str, columns: str = "*") -> Sql:
        where = [*self._narrowed(equal, column), *self._after_cursor(after, column, "id")]
        return with_conditions(f"SELECT {columns} FROM jobs_listing", where, self._order_by(column, "id") + tail)

    def _narrowed(self, equal: list[Sql], column: str) -> list[Sql]:
        """Return the conditions that the index of this order can check itself."""
        conditions = list(equal)
        scope, states = self.query.scope, self.query.states
        if column == "id":
            conditions += self.query.bounds
            if self.query.owner is not None and not equal:
                return [*conditions, Sql("owner_id = %s", (self.query.owner,))]
            if states is not None and len(states) == 1 and not equal:
                conditions.append(Sql("state = %s", (states[0],)))
        if scope is not None and len(scope) == 1 and not equal:
            conditions.append(Sql("project_id = %s", (scope[0],)))
        return conditions

    def _scan_groups(self, cursor: Any, after: Place | None, limit: int, max_rows: int) -> FoundPlaces:
        """Scan group by group in the order of their names, each by id."""
        key, table, column = _GROUPS[self.sort]
        rows: list[Place] = []
        for name, group in self._groups(cursor, after):
            begin = (None, after[1]) if after is not None and after[0] == name else None
            equal = [Sql(f"{key} = %s", (group,))]
            scanned = self._scan_index(cursor, equal, begin, limit - len(rows), max_rows)
            rows += [(name, pk) for _, pk in scanned.places]
            if scanned.next is not None:
                return FoundPlaces(rows, (name, scanned.next[1]))
            if len(rows) == limit:
                return FoundPlaces(rows, rows[-1])
            max_rows -= self._length(cursor, equal, begin, max_rows)  # fewer, otherwise there would be a next row
        return FoundPlaces(rows, None)

    def _length(self, cursor: Any, equal: list[Sql], after: Place | None, most: int) -> int:
        """Return how many rows a scan of one group by id checks."""
        inner = self._inner(equal, after, "id", f" LIMIT {most}", "id")
        cursor.execute(f"SELECT count(*) FROM ({inner.text}) l", inner.params)
        return int(cursor.fetchone()[0])

    def _groups(self, cursor: Any, after: Place | None) -> list[tuple[str, int]]:
        """Return the people or projects that have jobs, starting with the one in which the previous page ended."""
        key, table, column = _GROUPS[self.sort]
        where = [Sql(f"EXISTS (SELECT 1 FROM jobs_listing x WHERE x.{key} = g.id)")]
        if after is not None:
            where.append(Sql(f"g.{column} {'<=' if self.descending else '>='} %s", (after[0],)))
        if key == "project_id" and self.query.scope is not None:
            where.append(in_list("g.id", self.query.scope))
        order = f" ORDER BY g.{column} {'DESC' if self.descending else 'ASC'}"
        statement = with_conditions(f"SELECT g.{column}, g.id FROM {table} g", where, order)
        cursor.execute(statement.text, statement.params)
        return list(cursor.fetchall())

    def _counts_of_scan(self, cursor: Any) -> dict[str, Count]:
        """Count the newest rows by state: all, or a lower bound."""
        by_number = Finder(replace(self.query, states=None), "created", True)
        inner = by_number._inner([], None, "id", f" LIMIT {MAX_COUNTED}")
        where = by_number.query.conditions()
        statement = with_conditions(f"SELECT l.state, count(*) FROM ({inner.text}) l", where, " GROUP BY l.state")
        cursor.execute(statement.text, [*inner.params, *statement.params])
        rows = cursor.fetchall()
        last = by_number._inner([], None, "id", f" LIMIT 1 OFFSET {MAX_COUNTED}", "id")
        cursor.execute(last.text, last.params)
        more = cursor.fetchone() is not None
        return {state: Count(count, more) for state, count in rows if state}

    # Places

    def _after_cursor(self, after: Place | None, column: str, number: str) -> list[Sql]:
        if after is None:
            return []
        sign = "<" if self.descending else ">"
        value, pk = after
        if column in {"id", "l.id"}:
            return [Sql(f"{number} {sign} %s", (pk,))]
        return [Sql(f"({column}, {number}) {sign} (%s, %s)", (value, pk))]

    def _order_by(self, column: str, number: str, limit: int | None = None) -> str:
        way = "DESC" if self.descending else "ASC"
        columns = [number] if self.sort == "created" or column == "id" else [column, number]
        tail = "" if limit is None else f" LIMIT {limit}"
        return f" ORDER BY {', '.join(f'{name} {way}' for name in columns)}{tail}"

    def _to_page(self, rows: list[Place], limit: int) -> FoundPlaces:
        places = [self._place(*row) for row in rows[:limit]]
        return FoundPlaces(places, places[-1] if len(rows) > limit else None)

    def _place(self, value: Any, pk: int) -> Place:
        return (None if self.sort == "created" else value, pk)


def _bounded(count: int) -> Count:
    return Count(MAX_COUNTED, more=True) if count > MAX_COUNTED else Count(count)
