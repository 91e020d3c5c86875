"""Write series: named curves of an owner, appended as loose chunks inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connection
from django.db.models import Max

from portal import bulk
from portal.models import Chunk, Series
from portal.series.codec import Floats, Integers, Points, decode_loose, encode_loose, encode_merged, summarise

Owner = tuple[str, int]  # ("attempt", 17)

_LOOKUP = (
    'SELECT name, id FROM portal_series WHERE owner_kind = %s AND owner_id = %s AND "column" = %s AND name IN ({})'
)
_COLUMNS = (
    "series_id", "incarnation", "kind", "rank", "rank_last", "first_step", "last_step", "n", "stride",
    "first_time", "last_time", "min", "max", "sum", "odd", "data",
)  # fmt: skip
_INSERT = f"INSERT INTO portal_chunk ({', '.join(_COLUMNS)}) VALUES ({', '.join(['%s'] * len(_COLUMNS))})"


@dataclass(frozen=True)
class NewPoints:
    """New points of one series and incarnation. `runs` split the columns: (rank, Unix time, number of points) each."""

    name: str
    incarnation: int
    runs: Sequence[tuple[int, float, int]]
    step: Integers
    value: Floats


def find(owner: Owner, names: Iterable[str], *, column: str = "") -> dict[str, int]:
    """Return the ids of those series that exist."""
    found: dict[str, int] = {}
    with connection.cursor() as cursor:
        for some in bulk.batches(list(names), 1):
            cursor.execute(_LOOKUP.format(", ".join(["%s"] * len(some))), [*owner, column, *some])
            found.update(cursor.fetchall())
    return found


def declare(owner: Owner, names: Sequence[str], *, column: str = "", limit: int | None = None) -> dict[str, int]:
    """Return the ids of these series, creating missing ones while the owner has fewer than `limit`.

    Series beyond the limit are missing from the result. The caller holds the owner's row lock.
    """
    kind, owner_id = owner
    there = Series.objects.filter(owner_kind=kind, owner_id=owner_id, column=column)
    if limit is not None and len(names) > limit:  # the owner has at most `limit` series: load them all
        existing = dict(there.values_list("name", "id"))
        ids = {name: existing[name] for name in names if name in existing}
    else:
        ids = find(owner, names, column=column)
    fresh = [name for name in names if name not in ids]
    if not fresh:
        return ids
    if limit is not None:
        fresh = fresh[: max(0, limit - there.count())]
    Series.objects.bulk_create(
        [Series(owner_kind=kind, owner_id=owner_id, name=name, column=column) for name in fresh], ignore_conflicts=True
    )
    return ids | find(owner, fresh, column=column)


def append(ids: dict[str, int], columns: Iterable[NewPoints]) -> None:
    """Store new points as loose chunks; part of the caller's transaction."""
    insert([_row(ids[fresh.name], fresh) for fresh in columns])


def insert(rows: Sequence[tuple[Any, ...]]) -> None:
    """Write chunk rows, in the order of `_COLUMNS`."""
    with connection.cursor() as cursor:
        cursor.executemany(_INSERT, rows)


def _row(series_id: int, fresh: NewPoints) -> tuple[Any, ...]:
    ranks, times = [run[0] for run in fresh.runs], [run[1] for run in fresh.runs]
    about = summarise(fresh.step, fresh.value)
    data = encode_loose(list(fresh.runs), fresh.step, fresh.value)
    # fmt: off
    return (
        series_id, fresh.incarnation, Chunk.Kind.LOOSE, min(ranks), max(ranks),
        about.first_step, about.last_step, about.n, 0, min(times), max(times),
        about.min, about.max, about.sum, about.odd, data,
    )
    # fmt: on


def merged_row(series_id: int, incarnation: int, rank: int, points: Points) -> tuple[Any, ...]:
    """Return the row of a merged chunk, in the order of `_COLUMNS`: one rank's points, steps rising."""
    about = summarise(points.step, points.value)
    # fmt: off
    return (
        series_id, incarnation, Chunk.Kind.MERGED, rank, rank,
        about.first_step, about.last_step, about.n, about.stride, float(points.time.min()), float(points.time.max()),
        about.min, about.max, about.sum, about.odd, encode_merged(points),
    )
    # fmt: on


def names(owners: Iterable[Owner]) -> list[str]:
    """Return the names of these owners' series, in order of first appearance."""
    found: dict[str, None] = {}
    for kind, owner_id in owners:
        there = Series.objects.filter(owner_kind=kind, owner_id=owner_id, column="").order_by("id")
        found.update(dict.fromkeys(there.values_list("name", flat=True)))
    return list(found)


def recent(owner: Owner, *, seconds: float) -> list[tuple[str, int, int, Points]]:
    """Return (name, incarnation, rank, points) of the latest points: those within `seconds` of the newest."""
    kind, owner_id = owner
    loose = Chunk.objects.filter(
        series__owner_kind=kind,
        series__owner_id=owner_id,
        series__column=Series.Column.VALUE,
        kind__lt=Chunk.Kind.MERGED,
    )
    newest = loose.aggregate(newest=Max("last_time"))["newest"]
    if newest is None:
        return []
    rows = loose.filter(last_time__gte=newest - seconds).order_by("id")
    return [
        (name, incarnation, rank, points)
        for name, incarnation, data in rows.values_list("series__name", "incarnation", "data")
        for rank, points in decode_loose(bytes(data))
    ]


def drop(owner: Owner) -> None:
    """Delete all series of the owner; part of the caller's transaction."""
    kind, owner_id = owner
    owned = Series.objects.filter(owner_kind=kind, owner_id=owner_id)
    Chunk.objects.filter(series__in=owned).delete()
    owned.delete()
