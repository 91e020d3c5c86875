"""Merging in the background: loose chunks become full ones of one rank, and stored bands where ranks are many.

For a few chunks at a time everything is read and encoded first; the transaction that then swaps old rows for new takes
milliseconds, because on SQLite reports wait for it. It happens only if every old row is still there, so two compactions
at once, or one killed anywhere, do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import Count, Max, Min, Q, Sum

from portal.models import Chunk, Series
from portal.series import banding, store
from portal.series.codec import POINTS, Points, decode_loose, encode_loose, encode_merged, summarise
from portal.series.rows import merge
from portal.series.store import Fresh

ROWS = 512  # unmerged rows of one series and incarnation: as many are quickly read, more are gathered
IDLE_S = 600.0  # after this long without a report what there is gets merged, full or not
BATCH = 2_048  # rows looked at together
RANKS = 64  # merged in one transaction, so that it holds SQLite's lock for a few milliseconds only
_REST_S = 0.005  # between transactions, so that waiting writers get their turn


@dataclass(frozen=True)
class _Ripe:
    """A series and incarnation whose unmerged rows are worth merging."""

    series_id: int
    incarnation: int
    is_idle: bool


@dataclass(frozen=True)
class _Swap:
    """Rows to go, and rows to come in their place."""

    ids: Sequence[int]
    rows: Sequence[tuple[Any, ...]]


def compact(budget_s: float = 30.0, *, now: float | None = None) -> int:
    """Merge what is ripe, for about so long; answers how many rows went."""
    deadline = time.monotonic() + budget_s
    gone = 0
    for ripe in _ripe(time.time() if now is None else now):
        gone += _compact_one(ripe, deadline)
        if time.monotonic() > deadline:
            break
    return gone


def _ripe(now: float) -> list[_Ripe]:
    groups = (
        Chunk.objects.filter(kind__lt=Chunk.Kind.MERGED)
        .values("series_id", "incarnation")
        .annotate(
            rows=Count("id"),
            loose=Count("id", filter=Q(kind=Chunk.Kind.LOOSE)),
            points=Sum("n"),
            low=Min("rank"),
            high=Max("rank_last"),
            newest=Max("last_time"),
        )
        .order_by("series_id", "incarnation")
    )
    found = []
    for group in groups:
        is_idle = now - group["newest"] > IDLE_S
        ranks = group["high"] - group["low"] + 1
        if is_idle or group["loose"] >= ROWS or (group["rows"] > 1 and group["points"] >= 2 * POINTS * ranks):
            found.append(_Ripe(group["series_id"], group["incarnation"], is_idle))
    return found


def _compact_one(ripe: _Ripe, deadline: float) -> int:
    gone = 0
    while True:
        fields = ("id", "kind", "rank", "rank_last", "first_step", "last_step")
        unmerged = Chunk.objects.filter(
            series_id=ripe.series_id, incarnation=ripe.incarnation, kind__lt=Chunk.Kind.MERGED
        )
        rows = list(unmerged.order_by("-kind", "id").values_list(*fields)[:BATCH])
        _store_bands(ripe, [(row[4], row[5]) for row in rows if row[1] == Chunk.Kind.LOOSE and row[3] >= 0])
        swapped = sum(_write(swap) for swap in _swaps(ripe, [row[:4] for row in rows]))
        gone += swapped
        if len(rows) < BATCH or not swapped or time.monotonic() > deadline:
            return gone


def _store_bands(ripe: _Ripe, spans: list[banding.Interval]) -> None:
    """Bands before their points stop being loose: a crash in between only means that they are stored twice."""
    series = Series.objects.get(pk=ripe.series_id)
    if series.column or not spans:
        return
    made = banding.make(ripe.series_id, ripe.incarnation, spans, None)
    if made is None:
        return
    owner = (series.owner_kind, series.owner_id)
    with transaction.atomic():
        for column in banding.COLUMNS:
            ids = store.declare(owner, [series.name], column=column)
            points = banding.column_of(made, column)
            runs = _runs(0, points)
            store.append(ids, [Fresh(series.name, ripe.incarnation, runs, points.step, points.value)])


def _swaps(ripe: _Ripe, rows: Sequence[tuple[int, int, int, int]]) -> Iterator[_Swap]:
    """What to write for rows (id, kind, rank, rank_last): those that share ranks together, the others by themselves."""
    for group in _sharing_ranks(rows):
        # In order of precedence: what is gathered is older than what is loose.
        ids = [row[0] for row in sorted(group, key=lambda row: (-row[1], row[0]))]
        data = dict(Chunk.objects.filter(id__in=ids).values_list("id", "data"))
        if len(data) < len(ids):
            continue  # another compaction was here
        parts: dict[int, list[Points]] = {}
        for chunk_id in ids:
            for rank, points in decode_loose(bytes(data[chunk_id])):
                parts.setdefault(rank, []).append(points)
        ranks = {rank: merge([(points, 0) for points in mine])[0] for rank, mine in sorted(parts.items())}
        swap = _swap(ripe, ids, ranks)
        if len(ids) > 1 or len(swap.rows) != 1 or group[0][1] != Chunk.Kind.GATHERED or ripe.is_idle:
            yield swap


def _sharing_ranks(rows: Sequence[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Groups of rows whose ranges of ranks touch: a node's ranks come together, and go together."""
    group: list[tuple[int, int, int, int]] = []
    reach = 0
    for row in sorted(rows, key=lambda row: (row[2], row[3])):
        if group and row[2] > reach:
            yield group
            group = []
        reach = max(reach, row[3]) if group else row[3]
        group.append(row)
    if group:
        yield group


def _swap(ripe: _Ripe, ids: Sequence[int], ranks: dict[int, Points]) -> _Swap:
    """Full chunks of each rank, and one gathered row with what is left over.

    Of very many ranks in one row first gathered rows of fewer, whose turn comes next.
    """
    if len(ranks) > RANKS:
        order = list(ranks)
        slices = (order[at : at + RANKS] for at in range(0, len(order), RANKS))
        return _Swap(ids, [_gathered(ripe, {rank: ranks[rank] for rank in part}) for part in slices])
    rows, left = [], {}
    for rank, points in ranks.items():
        end = len(points) if ripe.is_idle else len(points) - len(points) % POINTS
        for at in range(0, end, POINTS):
            rows.append(_merged(ripe, rank, points.take(slice(at, min(at + POINTS, end)))))
        if end < len(points):
            left[rank] = points.take(slice(end, None))
    if left:
        rows.append(_gathered(ripe, left))
    return _Swap(ids, rows)


def _merged(ripe: _Ripe, rank: int, points: Points) -> tuple[Any, ...]:
    about = summarise(points.step, points.value)
    times = float(points.time.min()), float(points.time.max())
    # fmt: off
    return (
        ripe.series_id, ripe.incarnation, Chunk.Kind.MERGED, rank, rank,
        about.first_step, about.last_step, about.n, about.stride, *times,
        about.min, about.max, about.sum, about.odd, encode_merged(points),
    )
    # fmt: on


def _gathered(ripe: _Ripe, ranks: dict[int, Points]) -> tuple[Any, ...]:
    runs = [run for rank, points in ranks.items() for run in _runs(rank, points)]
    step = np.concatenate([points.step for points in ranks.values()])
    value = np.concatenate([points.value for points in ranks.values()])
    about, times = summarise(step, value), [run[1] for run in runs]
    # fmt: off
    return (
        ripe.series_id, ripe.incarnation, Chunk.Kind.GATHERED, min(ranks), max(ranks),
        about.first_step, about.last_step, about.n, 0, min(times), max(times),
        about.min, about.max, about.sum, about.odd, encode_loose(runs, step, value),
    )
    # fmt: on


def _runs(rank: int, points: Points) -> list[tuple[int, float, int]]:
    """One rank's points cut where their time changes."""
    starts = np.flatnonzero(np.diff(points.time, prepend=np.nan))
    counts = np.diff(starts, append=len(points))
    return [(rank, float(points.time[at]), int(n)) for at, n in zip(starts, counts, strict=True)]


def _write(swap: _Swap) -> int:
    """Swap rows in one transaction, unless one of them has gone already."""
    with transaction.atomic():
        gone, _ = Chunk.objects.filter(id__in=list(swap.ids), kind__lt=Chunk.Kind.MERGED).delete()
        if gone != len(swap.ids):
            transaction.set_rollback(True)
            return 0
        store.insert(swap.rows)
    time.sleep(_REST_S)
    return gone
