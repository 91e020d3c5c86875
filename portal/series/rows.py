"""Load chunk rows as numpy columns, from which a read decides which data to decode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from portal.models import Chunk
from portal.series.codec import EMPTY, Points, decode_merged, decode_rank

LAST_STEP = 2**53
_SERIES_PER_QUERY = 32  # series of which all data is in memory together

_FIELDS = (
    "id", "series_id", "incarnation", "kind", "first_step", "last_step", "n", "stride",
    "first_time", "last_time", "min", "max", "sum", "odd",
)  # fmt: skip
_DTYPE = np.dtype(
    [(name, "f8" if name in {"first_time", "last_time", "min", "max", "sum"} else "i8") for name in _FIELDS]
)
_MERGED = (
    f"SELECT {', '.join(_FIELDS)} FROM portal_chunk WHERE series_id IN ({{}}) AND kind = 2 AND rank = %s"
    " AND first_step <= %s AND last_step >= %s"
)
_DATA = (
    "SELECT series_id, first_step, data FROM portal_chunk WHERE series_id IN ({}) AND kind = 2 AND rank = %s"
    " AND first_step <= %s AND last_step >= %s"
)
_EXTREMES = (
    "SELECT series_id, first_step, last_step, min, max, odd, data FROM portal_chunk WHERE series_id IN ({})"
    " AND kind = 2 AND rank = %s AND first_step <= %s AND last_step >= %s"
)
# Loose rows hold several ranks; their statistics are over all of them.
_UNMERGED = (
    f"SELECT {', '.join(_FIELDS)} FROM portal_chunk WHERE series_id IN ({{}}) AND kind < 2 AND rank <= %s"
    " AND rank_last >= %s AND first_step <= %s AND last_step >= %s"
)


class ChunksMoved(Exception):
    """Raised if rows disappeared between selecting and decoding them because of a compaction. Retry."""


def of_rank(series_ids: Sequence[int], rank: int, start: int, end: int) -> NDArray[np.void]:
    """Return the rows with points of this rank in start..end, in order of id."""
    marks = ", ".join(["%s"] * len(series_ids))
    # One statement, so one snapshot: a row that is being merged is seen before or after, never twice or not at all.
    query = f"{_MERGED.format(marks)} UNION ALL {_UNMERGED.format(marks)} ORDER BY 1"
    with connection.cursor() as cursor:
        cursor.execute(query, [*series_ids, rank, end, start, *series_ids, rank, rank, end, start])
        return as_array(cursor.fetchall())


def as_array(rows: Iterable[tuple[Any, ...]]) -> NDArray[np.void]:
    """Return rows of `_FIELDS` as an array; a missing minimum becomes NaN."""
    columns = list(zip(*rows, strict=True))
    array = np.empty(len(columns[0]) if columns else 0, _DTYPE)
    for name, column in zip(_FIELDS, columns, strict=False):
        array[name] = column  # None becomes NaN in a column of floats
    return array


def open_rank(ids: Sequence[int], rank: int, *, times: bool = True) -> dict[int, Points]:
    """Return one rank's points in these chunks, by id. Raises ChunksMoved if one is gone."""
    found = {}
    for chunk_id, kind, data in data_of(ids):
        if kind == Chunk.Kind.MERGED:
            found[chunk_id] = decode_merged(data, times=times)
        else:
            found[chunk_id] = decode_rank(data, rank)
    return found


def data_of(ids: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return (id, kind, data) of these chunks. Raises ChunksMoved if one is gone."""
    found: list[tuple[int, int, bytes]] = []
    with connection.cursor() as cursor:
        for at in range(0, len(ids), 1_000):
            part = [int(i) for i in ids[at : at + 1_000]]
            marks = ", ".join(["%s"] * len(part))
            cursor.execute(f"SELECT id, kind, data FROM portal_chunk WHERE id IN ({marks})", part)
            found += [(chunk_id, kind, bytes(data)) for chunk_id, kind, data in cursor.fetchall()]
    if len(found) < len(ids):
        raise ChunksMoved
    return found


def merged_of(series_ids: Sequence[int], rank: int, start: int, end: int) -> Iterator[tuple[int, list[bytes]]]:
    """Return each series' merged chunks with points of this rank in start..end, in order of their first step."""
    for at in range(0, len(series_ids), _SERIES_PER_QUERY):
        part = series_ids[at : at + _SERIES_PER_QUERY]
        found: dict[int, list[bytes]] = {}
        with connection.cursor() as cursor:
            cursor.execute(_DATA.format(", ".join(["%s"] * len(part))), [*part, rank, end, start])
            # Sorted here: a database would carry the data through its sorting.
            for series_id, _, data in sorted(cursor.fetchall(), key=itemgetter(1)):
                found.setdefault(series_id, []).append(bytes(data))
        yield from found.items()


def merged_rows(
    series_ids: Sequence[int], start: int, end: int
) -> Iterator[tuple[int, tuple[int, int, float | None, float | None, int, bytes]]]:
    """Yield the merged chunks of these series of rank 0 with points in start..end, in order of their first step.

    Each is (series, (first step, last step, min, max, values that are not finite, data)).
    """
    for at in range(0, len(series_ids), _SERIES_PER_QUERY):
        part = series_ids[at : at + _SERIES_PER_QUERY]
        with connection.cursor() as cursor:
            cursor.execute(_EXTREMES.format(", ".join(["%s"] * len(part))), [*part, 0, end, start])
            for series_id, *row, data in sorted(cursor.fetchall(), key=itemgetter(1)):
                first, last, low, high, odd = row
                yield series_id, (first, last, low, high, odd, bytes(data))


def merge(parts: Sequence[tuple[Points, int]]) -> tuple[Points, NDArray[np.int64]]:
    """Return points in rising order of step, and their sources; for repeated steps, the last in the order of parts.

    A part is (points in order of arrival, source).
    """
    parts = [part for part in parts if len(part[0])]
    if not parts:
        return EMPTY, np.empty(0, np.int64)
    points = Points(
        np.concatenate([p.step for p, _ in parts]),
        np.concatenate([p.time for p, _ in parts]),
        np.concatenate([p.value for p, _ in parts]),
    )
    source = np.repeat(np.array([s for _, s in parts], np.int64), [len(p) for p, _ in parts])
    if len(points) > 1 and not np.all(points.step[1:] > points.step[:-1]):
        order = np.argsort(points.step, kind="stable")
        steps = points.step[order]
        order = order[np.append(steps[1:] != steps[:-1], True)]
        points, source = points.take(order), source[order]
    return points, source
