"""Cursor paging: the next page starts after the last row seen, however many rows come in between."""

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
    """The cursor was not one of ours, or belongs to another order."""

    def __init__(self) -> None:
        super().__init__("Not a cursor of this list and order. Use `next` of the previous page, or leave it out.")


@dataclass(frozen=True)
class SortOrder:
    """An order of a list: by one annotated or real field without nulls, ties by id in the same direction."""

    field: str
    descending: bool = False
    value: Callable[[Any], Any] | None = None  # of a row; default: the attribute of the field's name

    def __str__(self) -> str:
        return f"{'-' if self.descending else ''}{self.field}"

    def of(self, row: Any) -> Any:
        return self.value(row) if self.value else getattr(row, self.field)


@dataclass(frozen=True)
class Page(Generic[Row]):
    items: list[Row]
    next: str | None


def page(rows: QuerySet[Row], order: SortOrder, *, cursor: str | None, limit: int) -> Page[Row]:
    """Reads at most `limit` rows from after the cursor, in two queries.

    The first sorts nothing but keys: databases that cannot walk an index in the wanted order sort whole rows otherwise,
    and a job's row is long.
    """
    sign = "-" if order.descending else ""
    names = ["pk"] if order.field in {"id", "pk"} else [order.field, "pk"]
    if cursor:
        rows = _rows_after(rows, order, names, decode(cursor, order))
    keys = list(rows.order_by(*(sign + name for name in names)).values_list("pk", flat=True)[: limit + 1])
    found = {row.pk: row for row in rows.filter(pk__in=keys[:limit]).order_by()} if keys else {}
    items = [found[key] for key in keys[:limit] if key in found]  # one may have been deleted in between
    if not items or len(keys) <= limit:
        return Page(items, None)
    value = None if order.field in {"id", "pk"} else order.of(items[-1])
    return Page(items, encode(order, value, items[-1].pk))


def _rows_after(rows: QuerySet[Row], order: SortOrder, names: list[str], place: tuple[Any, int]) -> QuerySet[Row]:
    """Return the rows after a place; BadCursor where its value is not one that the field of the order takes."""
    try:
        return rows.filter(_after(order, names, place))
    except (TypeError, ValueError, OverflowError, ValidationError) as error:  # a text instead of a time, say
        raise BadCursor from error


def _after(order: SortOrder, names: list[str], place: tuple[Any, int]) -> Q:
    beyond = "lt" if order.descending else "gt"
    value, pk = place
    if names == ["pk"]:
        return Q(**{f"pk__{beyond}": pk})
    # The first condition is implied by the second; said apart, it lets an index on the field be used.
    return Q(**{f"{order.field}__{beyond}e": value}) & (
        Q(**{f"{order.field}__{beyond}": value}) | Q(**{order.field: value, f"pk__{beyond}": pk})
    )


def encode(order: SortOrder, value: Any, pk: int) -> str:
    """The cursor of the page that begins after this place. An order by id has no other value."""
    if isinstance(value, datetime):
        value = {"time": value.isoformat()}
    text = json.dumps([str(order), value, pk], separators=(",", ":"))
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(cursor: str, order: SortOrder) -> tuple[Any, int]:
    """The place that a cursor of this order tells; BadCursor for anything else."""
    try:
        name, value, pk = json.loads(urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
        if isinstance(value, dict):
            value = datetime.fromisoformat(value["time"]).astimezone(UTC)
        elif isinstance(value, str):
            value.encode()  # half a surrogate pair cannot be
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadCursor from error
    plain = value is None or isinstance(value, str | int | float | datetime)
    if isinstance(value, str) and "\0" in value:
        raise BadCursor
    if isinstance(value, int | float) and not -(2**63) <= value < 2**63:  # NaN, too, which no comparison holds for
        raise BadCursor
    if name != str(order) or not plain or not isinstance(pk, int) or not 0 <= pk < 2**63:
        raise BadCursor
    if (value is None) != (order.field in {"id", "pk"}):
        raise BadCursor
    return value, pk
