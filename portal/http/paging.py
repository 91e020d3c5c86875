"""Page by cursor: the next page starts after the last row of this one, however many rows are added in between."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet

Row = TypeVar("Row", bound=Model)


class BadCursor(ValueError):
    """Raised for a cursor that is not one of ours, or belongs to another order."""

    def __init__(self) -> None:
        super().__init__("Not a cursor of this list and order. Use `next` of the previous page, or leave it out.")


@dataclass(frozen=True)
class SortOrder:
    """An order of a list: by one annotated or real field without nulls, ties by id in the same direction."""

    field: str
    descending: bool = False
    value: Callable[[Any], Any] | None = None  # of a row; by default the attribute of that name

    def __str__(self) -> str:
        return f"{'-' if self.descending else ''}{self.field}"

    def of(self, row: Any) -> Any:
        return self.value(row) if self.value else getattr(row, self.field)


@dataclass(frozen=True)
class Page(Generic[Row]):
    items: list[Row]
    next: str | None


def page(rows: QuerySet[Row], order: SortOrder, *, cursor: str | None, limit: int) -> Page[Row]:
    """Return at most `limit` rows after the cursor, in two queries.

    The first sorts only keys: databases that cannot walk an index in this order would otherwise sort whole rows, and a
    job's row is long.
    """
    sign = "-" if order.descending else ""
    names = ["pk"] if order.field in {"id", "pk"} else [order.field, "pk"]
    if cursor:
        rows = _rows_after(rows, order, names, decode(cursor, order))
    keys = list(rows.order_by(*(sign + name for name in names)).values_list("pk", flat=True)[: limit + 1])
    found = {row.pk: row for row in rows.filter(pk__in=keys[:limit]).order_by()} if keys else {}
    items = [found[key] for key in keys[:limit] if key in found]  # a row may have been deleted in between
    if not items or len(keys) <= limit:
        return Page(items, None)
    value = None if order.field in {"id", "pk"} else order.of(items[-1])
    return Page(items, encode(order, value, items[-1].pk))


def page_or_first(rows: QuerySet[Row], order: SortOrder, *, cursor: str | None, limit: int) -> Page[Row]:
    """Return the page after the cursor; the first one without a cursor, or with one that is invalid or out of date."""
    try:
        return page(rows, order, cursor=cursor, limit=limit)
    except BadCursor:
        return page(rows, order, cursor=None, limit=limit)


def _rows_after(rows: QuerySet[Row], order: SortOrder, names: list[str], place: tuple[Any, int]) -> QuerySet[Row]:
    """Return the rows after this position; raise BadCursor if its value is invalid for the order's field."""
    try:
        return rows.filter(_after(order, names, place))
    except (TypeError, ValueError, OverflowError, ValidationError) as error:  # a text instead of a time, for example
        raise BadCursor from error


def _after(order: SortOrder, names: list[str], place: tuple[Any, int]) -> Q:
    beyond = "lt" if order.descending else "gt"
    value, pk = place
    if names == ["pk"]:
        return Q(**{f"pk__{beyond}": pk})
    # The first condition is implied by the second, but stated separately it lets an index on the field be used.
    return Q(**{f"{order.field}__{beyond}e": value}) & (
        Q(**{f"{order.field}__{beyond}": value}) | Q(**{order.field: value, f"pk__{beyond}": pk})
    )


def encode(order: SortOrder, value: Any, pk: int) -> str:
    """Return the cursor of the page after this position. An order by id has no other value."""
    if isinstance(value, datetime):
        value = {"time": value.isoformat()}
    text = json.dumps([str(order), value, pk], separators=(",", ":"))
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(cursor: str, order: SortOrder) -> tuple[Any, int]:
    """Return the position that a cursor of this order encodes. Raises BadCursor for anything else."""
    try:
        name, value, pk = json.loads(urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
        if isinstance(value, dict):
            value = datetime.fromisoformat(value["time"]).astimezone(UTC)
        elif isinstance(value, str):
            value.encode()  # lone surrogates cannot be encoded
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadCursor from error
    plain = value is None or isinstance(value, str | int | float | datetime)
    if isinstance(value, str) and "\0" in value:
        raise BadCursor
    # also rejects NaN, for which no comparison holds
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63:
        raise BadCursor
    if name != str(order) or not plain or not isinstance(pk, int) or not 0 <= pk < 2**63:
        raise BadCursor
    if (value is None) != (order.field in {"id", "pk"}):
        raise BadCursor
    return value, pk
