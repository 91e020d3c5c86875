"""Read curves: exact if they are short, else from the outline that chunk rows give.

Owners are in order of time (a job's attempts). The line of record is, per step, the value of the newest owner and
incarnation that has the step; the values it supersedes are drawn as ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from portal.models import Chunk
from portal.series import rows as chunk_rows
from portal.series.codec import POINTS, Floats, Integers, Points
from portal.series.envelope import Outline, concatenate, of_points, of_rows, thin
from portal.series.rows import LAST_STEP, ChunksMoved
from portal.series.store import Owner

_ATTEMPTS = 5  # to read between compactions

Source = tuple[Owner, int]  # owner and incarnation
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line: either `value`, or `min`, `max` and `mean` of about `points` stretches, named by their first step.

    `count` is how many points it represents, `last_step` the last of their steps (None if there are none). `source` are
    indices into `sources`; `gaps` are stretches (from, to, word) without any finite value; `superseded` are stretches
    (from, to) that a newer source has repeated, as far as the rows alone show it.
    """

    name: str
    rank: int
    step: Integers
    time: Floats
    value: Floats | None = None
    min: Floats | None = None
    max: Floats | None = None
    mean: Floats | None = None
    source: Integers
    sources: list[Source]
    count: int
    last_step: int | None
    gaps: list[tuple[int, int, str]] = field(default_factory=list)
    superseded: list[tuple[int, int]] = field(default_factory=list)

    @property
    def breaks(self) -> list[int]:
        """Return the steps at which another attempt or incarnation takes over."""
        return [int(step) for step in self.step[1:][np.diff(self.source) != 0]]


def curve(
    owners: Sequence[Owner],
    name: str,
    *,
    rank: int = 0,
    start: int | None = None,
    end: int | None = None,
    points: int | None = 1_000,
) -> Curve:
    """Return the line of record, in at most about `points` points; None: every point."""
    return SeriesReading(owners, name, ids_of(owners, name), rank=rank, start=start, end=end).curve(points)


def incarnation_curves(
    owners: Sequence[Owner],
    name: str,
    *,
    rank: int = 0,
    start: int | None = None,
    end: int | None = None,
    points: int | None = 1_000,
) -> list[Curve]:
    """Return one curve for each owner and incarnation, superseded ones included, oldest first."""
    reading = SeriesReading(owners, name, ids_of(owners, name), rank=rank, start=start, end=end)
    return [reading.curve(points, only=i) for i in range(len(reading.load()))]


def stretches(
    owners: Sequence[Owner], name: str, *, rank: int = 0, points: int = 1_000
) -> tuple[Outline, list[Source]]:
    """Return the line of record in stretches of one source, with their sums: per point if it is short, else per row."""
    reading = SeriesReading(owners, name, ids_of(owners, name), rank=rank)

    def read_once() -> tuple[Outline, list[Source]]:
        sources = reading.load()
        return (reading.outline() if reading.is_long(points) else of_points(*reading.exact())), sources

    return retry_if_moved(read_once)


def outline_of(
    owner: Owner,
    name: str,
    incarnation: int,
    *,
    rank: int = 0,
    start: int | None = None,
    end: int | None = None,
    points: int = 1_000,
) -> Outline:
    """Return what one incarnation reported, in stretches: one per chunk if it is long, else one per point."""
    reading = SeriesReading([owner], name, ids_of([owner], name), rank=rank, start=start, end=end)

    def read_once() -> Outline:
        wanted = [place for place, source in enumerate(reading.load()) if source[1] == incarnation]
        selected = np.isin(reading.source, wanted)
        reading.rows, reading.source = reading.rows[selected], reading.source[selected]
        return reading.outline() if reading.is_long(points) else of_points(*reading.exact())

    return retry_if_moved(read_once)


def ids_of(owners: Sequence[Owner], name: str, column: str = "") -> dict[int, int]:
    """Return a mapping of series ids to their owner's index."""
    places = {owner: place for place, owner in enumerate(owners)}
    if not places:
        return {}
    numbers: dict[str, list[int]] = {}
    for kind, number in places:
        numbers.setdefault(kind, []).append(number)
    # Raw SQL: building this query costs the ORM more time than the database needs to answer it. One condition per kind
    # instead of pairs: for a list of pairs SQLite scans every series.
    kinds = " OR ".join(f"owner_kind = %s AND owner_id IN ({', '.join(['%s'] * len(of))})" for of in numbers.values())
    query = f'SELECT id, owner_kind, owner_id FROM portal_series WHERE "column" = %s AND name = %s AND ({kinds})'
    parameters: list[str | int] = [column, name]
    for kind, of in numbers.items():
        parameters += [kind, *of]
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return {series_id: places[kind, number] for series_id, kind, number in cursor.fetchall()}


class SeriesReading:
    """One reading of a curve's rows, and what is computed from it. `places` maps each series to its owner."""

    def __init__(
        self,
        owners: Sequence[Owner],
        name: str,
        places: dict[int, int],
        *,
        rank: int = 0,
        start: int | None = None,
        end: int | None = None,
        times: bool = True,
    ) -> None:
        """Prepare the reading. `times`: whether report times are needed; not for series whose step is its time."""
        self.owners, self.name, self.places, self.rank, self.times = owners, name, places, rank, times
        self.start = max(0, start or 0)
        self.end = LAST_STEP if end is None else min(end, LAST_STEP)
        self.extra: dict[int, Points] = {}  # of rows that are in no table
        self.again: list[tuple[int, int]] = []  # superseded stretches

    def load(self) -> list[Source]:
        """Read the rows, and number their sources from the oldest to the newest."""
        ids = list(self.places)
        return self.use(chunk_rows.of_rank(ids, self.rank, self.start, self.end) if ids else chunk_rows.as_array([]))

    def use(self, rows: NDArray[np.void]) -> list[Source]:
        self.rows = rows
        place = np.array([self.places[i] for i in self.rows["series_id"].tolist()], np.int64)
        keys, self.source = np.unique(place << 32 | self.rows["incarnation"], return_inverse=True)
        self.sources = [(self.owners[key >> 32], key & 0xFFFFFFFF) for key in keys.tolist()]
        # Of several points at a step the last one wins: the newest source, then loose before merged, then the later id.
        order = np.lexsort((self.rows["id"], -self.rows["kind"], self.source))
        self.rows, self.source = self.rows[order], self.source[order]
        return self.sources

    def curve(self, points: int | None, only: int | None = None) -> Curve:
        return retry_if_moved(lambda: self._curve(points, only))

    def _curve(self, points: int | None, only: int | None) -> Curve:
        self.load()
        self.again = self.superseded()
        if only is not None:
            self.rows, self.source = self.rows[self.source == only], self.source[self.source == only]
        if points is not None and self.is_long(points):
            return self._summary(thin(self.outline(), points))
        exact, source = self.exact()
        if points is not None and len(exact) > points:
            return self._summary(thin(of_points(exact, source), points))
        return self._whole(exact, source)

    def superseded(self) -> list[tuple[int, int]]:
        """Return the stretches within the range where a source overlaps a newer one; adjacent ones are joined."""
        n = len(self.sources)
        if n < 2:
            return []
        first, last = np.full(n, LAST_STEP), np.full(n, -1)
        np.minimum.at(first, self.source, self.rows["first_step"])
        np.maximum.at(last, self.source, self.rows["last_step"])
        older, newer = np.triu_indices(n, 1)
        low = np.maximum(np.maximum(first[older], first[newer]), self.start)
        high = np.minimum(np.minimum(last[older], last[newer]), self.end)
        found: list[tuple[int, int]] = []
        for a, b in sorted(zip(low[low <= high].tolist(), high[low <= high].tolist(), strict=True)):
            if found and a <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(b, found[-1][1]))
            else:
                found.append((a, b))
        return found

    def is_long(self, points: int) -> bool:
        """Return whether the rows alone suffice for a picture of `points` points."""
        return int(np.count_nonzero(self.rows["kind"] == Chunk.Kind.MERGED)) >= max(2, points // 2)

    def exact(self, which: NDArray[np.int64] | None = None) -> tuple[Points, Integers]:
        """Return the line of record from these rows (default: all), within the range, and the source of each point."""
        which = np.arange(len(self.rows)) if which is None else which
        ids = [i for i in self.rows["id"][which].tolist() if i not in self.extra]
        opened = self.extra | chunk_rows.open_rank(ids, self.rank, times=self.times)
        parts = [(opened[int(self.rows["id"][i])], int(self.source[i])) for i in which]
        points, source = chunk_rows.merge(parts)
        if self.start > 0 or self.end < LAST_STEP:
            inside = slice(*np.searchsorted(points.step, (self.start, self.end + 1)))
            points, source = points.take(inside), source[inside]
        return points, source

    def outline(self) -> Outline:
        """Return the curve's outline: from the rows where one chunk alone covers its steps, else from the points."""
        rows, remaining = self.rows, ~_superseded(self.rows, self.source)
        alone = remaining & _alone(rows, remaining) & (rows["kind"] == Chunk.Kind.MERGED)
        alone &= (rows["first_step"] >= self.start) & (rows["last_step"] <= self.end)
        pieces = [of_rows(rows[alone], self.source[alone])]
        if (rest := np.flatnonzero(remaining & ~alone)).size:
            points, source = self.exact(rest)
            pieces.append(thin(of_points(points, source), max(1, len(points) * 4 // POINTS)))
        return concatenate(pieces)

    def _whole(self, points: Points, source: Integers) -> Curve:
        return Curve(
            name=self.name,
            rank=self.rank,
            step=points.step,
            time=points.time,
            value=points.value,
            source=source,
            sources=self.sources,
            count=len(points),
            last_step=int(points.step[-1]) if len(points) else None,
            gaps=gaps(points.step, points.step, points.value),
            superseded=self.again,
        )

    def _summary(self, outline: Outline) -> Curve:
        mean = outline.mean()
        return Curve(
            name=self.name,
            rank=self.rank,
            step=outline.first,
            time=outline.time,
            min=outline.min,
            max=outline.max,
            mean=mean,
            source=outline.source,
            sources=self.sources,
            count=int(outline.n.sum()),
            last_step=int(outline.last.max()) if len(outline.last) else None,
            gaps=gaps(outline.first, outline.last, mean),
            superseded=self.again,
        )


def retry_if_moved(read: Callable[[], T]) -> T:
    """Return what `read` returns, retrying if a compaction came in between."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return read()
        except ChunksMoved:
            continue
    return read()


def gaps(first: Integers, last: Integers, value: Floats) -> list[tuple[int, int, str]]:
    """Return the stretches of values that cannot be drawn, with the word of their first."""
    odd = np.concatenate(([False], ~np.isfinite(value), [False]))
    edges = np.flatnonzero(np.diff(odd)).reshape(-1, 2)
    return [(int(first[a]), int(last[b - 1]), word(float(value[a]))) for a, b in edges.tolist()]


def word(value: float) -> str:
    """Return the word for a value that JSON cannot express, as reports write it."""
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"


def _alone(rows: NDArray[np.void], remaining: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Select rows whose range of steps does not overlap any other remaining row."""
    alone = np.zeros(len(rows), np.bool_)
    which = np.flatnonzero(remaining)
    which = which[np.argsort(rows["first_step"][which], kind="stable")]
    first, reach = rows["first_step"][which], np.maximum.accumulate(rows["last_step"][which])
    clear_before = np.concatenate(([True], first[1:] > reach[:-1]))
    alone[which] = clear_before & np.concatenate((clear_before[1:], [True]))
    return alone


def _superseded(rows: NDArray[np.void], source: Integers) -> NDArray[np.bool_]:
    """Select rows all of whose steps newer sources have, judged from evenly spaced chunks without decoding any.

    A job that restarted from the beginning has every step twice; decoding all that only to drop it would cost a second.
    """
    gone = np.zeros(len(rows), np.bool_)
    cover: list[tuple[int, int, int]] = []  # (first, last, stride) of newer sources
    for newest in sorted(set(source.tolist()), reverse=True):
        newest_rows = np.flatnonzero(source == newest)
        for first, last, stride in cover:
            inside = (rows["first_step"][newest_rows] >= first) & (rows["last_step"][newest_rows] <= last)
            on_it = (rows["stride"][newest_rows] % stride == 0) & (
                (rows["first_step"][newest_rows] - first) % stride == 0
            )
            even = (rows["stride"][newest_rows] > 0) | (stride == 1)
            gone[newest_rows] |= inside & on_it & even
        cover += _stretches(rows[newest_rows])
    return gone


def _stretches(rows: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Return the ranges of evenly spaced chunks, consecutive ones joined."""
    rows = rows[(rows["kind"] == Chunk.Kind.MERGED) & (rows["stride"] > 0)]
    rows = np.sort(rows, order="first_step")
    if not len(rows):
        return []
    follows = (rows["first_step"][1:] == rows["last_step"][:-1] + rows["stride"][:-1]) & (
        rows["stride"][1:] == rows["stride"][:-1]
    )
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    ends = np.append(starts[1:] - 1, len(rows) - 1)
    return [
        (int(rows["first_step"][a]), int(rows["last_step"][b]), int(rows["stride"][a]))
        for a, b in zip(starts, ends, strict=True)
    ]
