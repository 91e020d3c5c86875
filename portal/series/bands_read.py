"""Read bands from the database: stored ones for the past, computed ones for recent points.

A band's columns are series of their own (`Series.Column`), written by the compaction; it has not processed points that
are still loose, so the bands of their steps are computed at each read.
"""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from portal.models import Chunk, Series
from portal.series import bands, rows
from portal.series.bands import PATIENCE_S, Band
from portal.series.codec import Floats, Integers, Points, decode_loose, decode_merged
from portal.series.envelope import of_points, thin
from portal.series.read import SeriesReading, Source, gaps, ids_of, retry_if_moved
from portal.series.store import Owner

COLUMNS = (Series.Column.MIN, Series.Column.MEDIAN, Series.Column.MAX, Series.Column.WORST)
UNKNOWN = -1  # the worst rank of a stretch of an outline
_SYNTHETIC = 2**62  # ids of rows that are in no table, and newer than all that are

Interval = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Bands:
    """A band as pages draw it. `gaps` are stretches (from, to, word) where no rank had a finite value."""

    name: str
    step: Integers
    min: Floats
    median: Floats
    max: Floats
    worst_rank: Integers
    sources: list[Source]
    gaps: list[tuple[int, int, str]]


@dataclass(frozen=True)
class ComputedBands:
    """A band computed from one series and incarnation, with the newest Unix time of each step."""

    series_id: int
    incarnation: int
    band: Band
    time: Floats


def band(
    owners: Sequence[Owner],
    name: str,
    *,
    start: int | None = None,
    end: int | None = None,
    points: int | None = 1_000,
    now: float | None = None,
) -> Bands:
    """Return the band of the line of record: per step, over the ranks of the newest incarnation that has it."""
    reading = _BandReading(owners, name, start, end, clock.time() if now is None else now)
    return retry_if_moved(lambda: reading.bands(points))


class _BandReading:
    """A consistent reading of a band's four curves."""

    def __init__(self, owners: Sequence[Owner], name: str, start: int | None, end: int | None, now: float) -> None:
        self.owners, self.name, self.now = owners, name, now
        self.series_ids = ids_of(owners, name)
        self.stored = {column: ids_of(owners, name, column) for column in COLUMNS}
        self.readings = [SeriesReading(owners, name, self.stored[c], start=start, end=end) for c in COLUMNS]

    def bands(self, points: int | None) -> Bands:
        self._load()
        if points is not None and all(reading.is_long(points) for reading in self.readings):
            outlines = [thin(reading.outline(), points) for reading in self.readings]
            low, middle, high, _ = outlines
            # One column may just have been merged and another not yet; then their stretches differ.
            if all(np.array_equal(low.first, outline.first) for outline in outlines):
                worst = np.full(len(low.first), UNKNOWN, np.int64)
                return self._answer(low.first, low.last, low.min, middle.mean(), high.max, worst)
        return self._exact(points)

    def _exact(self, points: int | None) -> Bands:
        columns = [reading.exact() for reading in self.readings]
        low, middle, high, worst = (column[0] for column in columns)
        if points is None or len(low) <= points:
            return self._answer(low.step, low.step, low.value, middle.value, high.value, worst.value.astype(np.int64))
        source = columns[0][1]
        thinned = [thin(of_points(column, source), points) for column in (low, middle, high)]
        first = thinned[0].first
        return self._answer(
            first,
            thinned[0].last,
            thinned[0].min,
            thinned[1].mean(),
            thinned[2].max,
            _worst(high, worst, np.searchsorted(high.step, first)),
        )

    def _load(self) -> None:
        """Load the stored columns once, and compute the bands of what is not compacted yet."""
        made = fresh(list(self.series_ids), self.readings[0].start, self.readings[0].end, self.now)
        every = [series_id for ids in self.stored.values() for series_id in ids]
        found = rows.of_rank(every, 0, self.readings[0].start, self.readings[0].end) if every else rows.as_array([])
        for column, reading in zip(COLUMNS, self.readings, strict=True):
            stored_rows = found[np.isin(found["series_id"], list(self.stored[column]))]
            # Recent loose points may have no stored band series yet.
            reading.places = self.stored[column] | {-1 - made_of: place for made_of, place in self.series_ids.items()}
            reading.extra = {}
            synthetic = []
            for i, band in enumerate(made):
                points = column_of(band, column)
                reading.extra[_SYNTHETIC + i] = points
                synthetic.append(_row(_SYNTHETIC + i, -1 - band.series_id, band.incarnation, points))
            reading.use(np.concatenate((stored_rows, rows.as_array(synthetic))))

    def _answer(
        self, first: Integers, last: Integers, low: Floats, middle: Floats, high: Floats, worst: Integers
    ) -> Bands:
        return Bands(
            name=self.name,
            step=first,
            min=low,
            median=middle,
            max=high,
            worst_rank=worst,
            sources=self.readings[0].sources,
            gaps=gaps(first, last, middle),
        )


def fresh(series_ids: Sequence[int], start: int, end: int, now: float | None) -> list[ComputedBands]:
    """Return the bands of steps with loose points; steps that still wait for ranks only if `now` is None."""
    there = Chunk.objects.filter(first_step__lte=end, last_step__gte=start, rank_last__gte=0)
    loose = there.filter(series_id__in=list(series_ids), kind=Chunk.Kind.LOOSE)
    touched: dict[tuple[int, int], list[Interval]] = {}
    for series_id, incarnation, first, last in loose.values_list("series_id", "incarnation", "first_step", "last_step"):
        touched.setdefault((series_id, incarnation), []).append((max(first, start), min(last, end)))
    made = (make(series_id, incarnation, spans, now) for (series_id, incarnation), spans in touched.items())
    return [band for band in made if band is not None]


def make(series_id: int, incarnation: int, spans: Sequence[Interval], now: float | None) -> ComputedBands | None:
    """Return the band over these steps, of every rank's points wherever they are stored."""
    ranks = _rank_count(series_id)
    if ranks < 2:
        return None
    spans = _joined(spans)
    low, high = spans[0][0], spans[-1][1]
    there = Chunk.objects.filter(
        series_id=series_id, incarnation=incarnation, first_step__lte=high, last_step__gte=low, rank_last__gte=0
    )
    parts = [
        part
        for data in there.filter(kind__lt=Chunk.Kind.MERGED).order_by("-kind", "id").values_list("data", flat=True)
        for part in decode_loose(bytes(data))
        if part[0] >= 0
    ]
    # Read after the loose rows: points that a compaction merges in between are read twice, not lost.
    merged = there.filter(kind=Chunk.Kind.MERGED, rank__gte=0).order_by("id").values_list("rank", "data")
    parts = [(rank, decode_merged(bytes(data))) for rank, data in merged] + parts
    return _made(series_id, incarnation, parts, spans, ranks, now)


def _made(
    series_id: int,
    incarnation: int,
    parts: Sequence[tuple[int, Points]],
    spans: Sequence[Interval],
    ranks: int,
    now: float | None,
) -> ComputedBands | None:
    """Return the band of points in order of precedence; the last takes precedence."""
    rank = np.repeat([rank for rank, _ in parts], [len(points) for _, points in parts])
    step = np.concatenate([points.step for _, points in parts])
    inside = np.zeros(len(step), np.bool_)
    for first, last in spans:
        inside |= (step >= first) & (step <= last)
    step, rank = step[inside], rank[inside]
    if not len(step):
        return None
    value = np.concatenate([points.value for _, points in parts])[inside]
    time = np.concatenate([points.time for _, points in parts])[inside]
    steps, row = np.unique(step, return_inverse=True)
    who, column = np.unique(rank, return_inverse=True)
    values, there = np.zeros((len(steps), len(who))), np.zeros((len(steps), len(who)), np.bool_)
    values[row, column], there[row, column] = value, True
    newest = np.full(len(steps), -np.inf)
    np.maximum.at(newest, row, time)
    shown = np.ones(len(steps), np.bool_) if now is None else (there.sum(1) >= ranks) | (newest <= now - PATIENCE_S)
    if not shown.any():
        return None
    columns = bands.across(values[shown], there[shown], who.astype(np.int64))
    return ComputedBands(series_id, incarnation, Band(steps[shown], *columns), newest[shown])


def _rank_count(series_id: int) -> int:
    """Return how many ranks report this series: 0 to the highest that ever did."""
    with connection.cursor() as cursor:
        # Two aggregates, because each uses its own index.
        cursor.execute(
            "SELECT MAX(rank) FROM portal_chunk WHERE series_id = %s AND kind = 2"
            " UNION ALL SELECT MAX(rank_last) FROM portal_chunk WHERE series_id = %s AND kind < 2",
            [series_id, series_id],
        )
        return 1 + max(-1 if highest is None else int(highest) for (highest,) in cursor.fetchall())


def _joined(spans: Sequence[Interval]) -> list[Interval]:
    """Merge overlapping and adjacent intervals; return them in rising order."""
    joined: list[Interval] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def column_of(made: ComputedBands, column: str) -> Points:
    """Return one column of a band as the points of a curve."""
    band = made.band
    value = {"min": band.min, "median": band.median, "max": band.max, "worst": band.worst.astype(np.float64)}[column]
    return Points(band.step, made.time, value)


def _row(row_id: int, series_id: int, incarnation: int, points: Points) -> tuple[object, ...]:
    """Return a row that is in no table, in the format of rows.as_array."""
    first, last = int(points.step[0]), int(points.step[-1])
    times = (float(points.time[0]), float(points.time[-1]))
    return (row_id, series_id, incarnation, Chunk.Kind.LOOSE, first, last, len(points), 0, *times, None, None, 0.0, 0)


def _worst(high: Points, worst: Points, starts: NDArray[np.intp]) -> Integers:
    """Return the worst rank of each stretch: the one at its largest value; NaN takes precedence."""
    badness = np.where(np.isnan(high.value), np.inf, high.value)
    ends = np.append(starts[1:], len(badness))
    at = [start + int(np.argmax(badness[start:end])) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return worst.value[at].astype(np.int64)
