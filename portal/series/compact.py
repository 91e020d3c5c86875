"""Merge chunks in the background: loose chunks into full ones of one rank, and bands for series of many ranks.

For a few chunks at a time everything is read and encoded first; the transaction that then swaps old rows for new takes
milliseconds, because on SQLite reports wait for it. It happens only if every old row still exists, so two compactions
at once, or one killed at any point, do no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from django.db import transaction
from django.db.models import Count, Max, Min, Q, Sum

from portal.models import Chunk, Series
from portal.series import bands_read, store
from portal.series.codec import POINTS, Points, decode_loose, encode_loose, summarise
from portal.series.rows import merge
from portal.series.store import NewPoints, Owner

ROWS = 512  # unmerged rows of one series and incarnation: as many are read quickly, more are gathered
BATCH = 2_048  # rows read together
# Per transaction, so that it holds SQLite's lock for some ten milliseconds only, and never for 100.
RANKS = 32
SWAPPED = 64 * POINTS
_REST_S = 0.005  # between transactions, so that waiting writers get their turn


@dataclass(frozen=True)
class _DueSeries:
    """A series and incarnation whose unmerged rows are worth merging."""

    series_id: int
    incarnation: int
    is_idle: bool


class _Row(NamedTuple):
    """An unmerged row without its data."""

    id: int
    kind: int
    rank: int
    rank_last: int
    first_step: int
    last_step: int
    n: int


@dataclass(frozen=True)
class _Plan:
    """Rows to swap together, in order of precedence; `cut`: into rows of fewer ranks, else into full chunks."""

    rows: Sequence[_Row]
    cut: bool


@dataclass(frozen=True)
class _Swap:
    """Rows to delete, and the rows that replace them."""

    ids: Sequence[int]
    rows: Sequence[tuple[Any, ...]]


def compact(budget_s: float = 30.0, *, quiet: Callable[[Set[Owner]], Set[Owner]]) -> int:
    """Merge series that are due, for about `budget_s` seconds; return how many rows were removed.

    `quiet` returns which of some owners no longer report: their rows are merged even into chunks that are not full. The
    times in the chunks cannot show that, because they come from nodes' clocks.
    """
    deadline = time.monotonic() + budget_s
    gone = 0
    for ripe in _due_series(quiet):
        gone += _compact_series(ripe, deadline)
        if time.monotonic() > deadline:
            break
    return gone


def _due_series(quiet: Callable[[Set[Owner]], Set[Owner]]) -> list[_DueSeries]:
    groups = (
        Chunk.objects.filter(kind__lt=Chunk.Kind.MERGED)
        .values_list("series_id", "incarnation", "series__owner_kind", "series__owner_id")
        .annotate(
            rows=Count("id"),
            loose=Count("id", filter=Q(kind=Chunk.Kind.LOOSE)),
            points=Sum("n"),
            ranks=Max("rank_last") - Min("rank") + 1,
        )
        .order_by("series_id", "incarnation")
    )
    found = list(groups)
    idle = quiet({(kind, number) for _, _, kind, number, *_ in found})
    ripe = []
    for series_id, incarnation, kind, number, rows, loose, points, ranks in found:
        is_idle = (kind, number) in idle
        if is_idle or loose >= ROWS or (rows > 1 and points >= 2 * POINTS * ranks):
            ripe.append(_DueSeries(series_id, incarnation, is_idle))
    return ripe


def _compact_series(due: _DueSeries, deadline: float) -> int:
    """Merge in rounds until nothing worth merging is left; a transaction holds only a limited number of rows."""
    gone = 0
    while True:
        unmerged = Chunk.objects.filter(series_id=due.series_id, incarnation=due.incarnation).order_by("id")
        rows, loose = (
            [_Row(*row) for row in unmerged.filter(kind=kind).values_list(*_Row._fields)[:limit]]
            for kind, limit in ((Chunk.Kind.GATHERED, None), (Chunk.Kind.LOOSE, BATCH))
        )
        plans, is_all = _plan(rows, loose, is_idle=due.is_idle)
        _store_bands(due, [row for plan in plans for row in plan.rows])
        swapped = sum(_write(swap) for plan in plans if (swap := _swap(due, plan)))
        gone += swapped
        if not swapped or (is_all and len(loose) < BATCH) or time.monotonic() > deadline:
            return gone


def _store_bands(due: _DueSeries, rows: Sequence[_Row]) -> None:
    """Store bands before their points stop being loose: a crash in between only means that they are stored twice."""
    loose = (row for row in rows if row.kind == Chunk.Kind.LOOSE and row.rank_last >= 0)
    spans = [(row.first_step, row.last_step) for row in loose]
    series = Series.objects.get(pk=due.series_id)
    if series.column or not spans:
        return
    made = bands_read.make(due.series_id, due.incarnation, spans, None)
    if made is None:
        return
    owner = (series.owner_kind, series.owner_id)
    with transaction.atomic():
        for column in bands_read.COLUMNS:
            ids = store.declare(owner, [series.name], column=column)
            points = bands_read.column_of(made, column)
            runs = _runs(0, points)
            store.append(ids, [NewPoints(series.name, due.incarnation, runs, points.step, points.value)])


def _plan(gathered: Sequence[_Row], loose: Sequence[_Row], *, is_idle: bool) -> tuple[list[_Plan], bool]:
    """Return which rows to swap in this round, and whether that is all. Both inputs are in order of id.

    Always the oldest loose rows are merged, and only if no rank has two gathered rows: so gathered rows are always
    older than loose ones, and of two gathered rows the one with the lower id is the older.
    """
    if twice := [group for group in _sharing_ranks(gathered) if len(group) > 1]:
        return [_Plan(group, cut=False) for group in twice], False
    if any(row.rank_last - row.rank >= RANKS for row in loose):
        return [_Plan(_first_part(loose), cut=True)], False
    plans, is_all = [], True
    for group in _sharing_ranks([*gathered, *loose]):
        part = _first_part(group)
        is_all = is_all and len(part) == len(group)
        if len(part) > 1 or part[0].kind == Chunk.Kind.LOOSE or part[0].n >= POINTS or is_idle:
            plans.append(_Plan(part, cut=False))
    return plans, is_all


def _first_part(rows: Sequence[_Row]) -> list[_Row]:
    """Return the first rows with a bounded number of points together, but at least two rows."""
    points = np.cumsum([row.n for row in rows])
    return list(rows[: max(2, int(np.searchsorted(points, SWAPPED, side="right")))])


def _sharing_ranks(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Group rows whose ranges of ranks overlap (a node's ranks report together), each group in the given order."""
    place = {row.id: i for i, row in enumerate(rows)}
    groups: list[list[_Row]] = []
    reach = 0
    for row in sorted(rows, key=lambda row: (row.rank, row.rank_last)):
        if groups and row.rank <= reach:
            groups[-1].append(row)
            reach = max(reach, row.rank_last)
        else:
            groups.append([row])
            reach = row.rank_last
    return [sorted(group, key=lambda row: place[row.id]) for group in groups]


def _swap(due: _DueSeries, plan: _Plan) -> _Swap | None:
    """Return full chunks of each rank and one gathered row for the remainder; or narrow rows for wide ones."""
    ids = [row.id for row in plan.rows]
    data = dict(Chunk.objects.filter(id__in=ids).values_list("id", "data"))
    if len(data) < len(ids):
        return None  # another compaction has replaced these rows
    parts: dict[int, list[Points]] = {}
    for chunk_id in ids:
        for rank, points in decode_loose(bytes(data[chunk_id])):
            parts.setdefault(rank, []).append(points)
    ranks = {rank: merge([(points, 0) for points in points_parts])[0] for rank, points_parts in sorted(parts.items())}
    rows = _cut(due, ranks) if plan.cut else _filled(due, ranks)
    is_as_before = len(ids) == len(rows) == 1 and plan.rows[0].kind == Chunk.Kind.GATHERED and not due.is_idle
    return None if is_as_before else _Swap(ids, rows)


def _cut(due: _DueSeries, ranks: dict[int, Points]) -> list[tuple[Any, ...]]:
    slices: dict[int, dict[int, Points]] = {}
    for rank, points in ranks.items():
        slices.setdefault(rank // RANKS, {})[rank] = points
    return [_gathered(due, part) for part in slices.values()]


def _filled(due: _DueSeries, ranks: dict[int, Points]) -> list[tuple[Any, ...]]:
    rows, left = [], {}
    for rank, points in ranks.items():
        end = len(points) if due.is_idle else len(points) - len(points) % POINTS
        for at in range(0, end, POINTS):
            part = points.take(slice(at, min(at + POINTS, end)))
            rows.append(store.merged_row(due.series_id, due.incarnation, rank, part))
        if end < len(points):
            left[rank] = points.take(slice(end, None))
    return [*rows, _gathered(due, left)] if left else rows


def _gathered(due: _DueSeries, ranks: dict[int, Points]) -> tuple[Any, ...]:
    runs = [run for rank, points in ranks.items() for run in _runs(rank, points)]
    step = np.concatenate([points.step for points in ranks.values()])
    value = np.concatenate([points.value for points in ranks.values()])
    about, times = summarise(step, value), [run[1] for run in runs]
    # fmt: off
    return (
        due.series_id, due.incarnation, Chunk.Kind.GATHERED, min(ranks), max(ranks),
        about.first_step, about.last_step, about.n, 0, min(times), max(times),
        about.min, about.max, about.sum, about.odd, encode_loose(runs, step, value),
    )
    # fmt: on


def _runs(rank: int, points: Points) -> list[tuple[int, float, int]]:
    """Return one rank's points, split where their time changes."""
    starts = np.flatnonzero(np.diff(points.time, prepend=np.nan))
    counts = np.diff(starts, append=len(points))
    return [(rank, float(points.time[at]), int(n)) for at, n in zip(starts, counts, strict=True)]


def _write(swap: _Swap) -> int:
    """Swap rows in one transaction, unless one of them has been removed already."""
    with transaction.atomic():
        gone, _ = Chunk.objects.filter(id__in=list(swap.ids), kind__lt=Chunk.Kind.MERGED).delete()
        if gone != len(swap.ids):
            transaction.set_rollback(True)
            return 0
        store.insert(swap.rows)
    time.sleep(_REST_S)
    return gone
