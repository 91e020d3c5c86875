"""One field of many GPUs over one stretch of time, as a grid of GPUs × columns: what heat maps and maps of use draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nodes.models import Agent, Frame
from nodes.telemetry import frames
from nodes.telemetry.fields import LONGEST_S, PLACE, gpu_owner
from nodes.telemetry.thin import LEVELS, thinned
from nodes.telemetry.wire import MISSING
from portal.models import Chunk, Series
from portal.series.codec import Floats, Integers, Points, decode_merged
from portal.series.read import ids_of
from portal.series.rows import data_of

Stretch = tuple[float, float]  # Unix seconds


@dataclass
class Grid:
    """Means and maxima, GPUs × columns; NaN where nothing is told. Column i begins at `start + i × width`."""

    start: int
    width: int
    mean: Floats
    most: Floats


def grid(
    gpu_ids: Sequence[int],
    name: str,
    *,
    start: int,
    end: int,
    columns: int,
    within: Mapping[int, Sequence[Stretch]] | None = None,
) -> Grid:
    """The field of these GPUs from `start` to `end` (Unix seconds), in at most so many columns of whole seconds.

    With `within` a GPU counts in its stretches alone, however long a column is.
    """
    width = max(1, -(-(end - start) // max(1, columns)))
    gathering = _Gathering(len(gpu_ids), start, width, -(-(end - start) // width))
    place = {gpu_id: row for row, gpu_id in enumerate(gpu_ids)}
    if within is not None:
        gathering.within = {place[gpu_id]: list(stretches) for gpu_id, stretches in within.items()}
    for seconds in (level.seconds for level in reversed(LEVELS)):
        _add_chunks(gathering, place, thinned(name, seconds), seconds, start, end)
    _add_chunks(gathering, place, name, 1, start, end)
    _add_frames(gathering, place, name, start, end)
    return gathering.grid()


class _Gathering:
    def __init__(self, rows: int, start: int, width: int, columns: int) -> None:
        self.start, self.width, self.columns = start, width, columns
        self.total, self.count = np.zeros((rows, columns)), np.zeros((rows, columns))
        self.most = np.full((rows, columns), -np.inf)
        self.within: dict[int, list[Stretch]] | None = None

    def inside(self, row: int, step: Integers, value: Floats, seconds: int) -> tuple[Integers, Floats]:
        """What counts of one GPU's points: those of which the middle is within its stretches."""
        if self.within is None:
            return step, value
        middle, mine = step + seconds / 2, np.zeros(len(step), np.bool_)
        for since, until in self.within.get(row, ()):
            mine |= (middle >= since) & (middle < until)
        return step[mine], value[mine]

    def add(self, row: int, step: Integers, value: Floats, weight: int) -> None:
        """Points of one GPU, steps rising."""
        if not (finite := np.isfinite(value)).all():
            step, value = step[finite], value[finite]
        edges = np.searchsorted(step, self.start + self.width * np.arange(self.columns + 1))
        where = np.flatnonzero(edges[1:] > edges[:-1])
        if not len(where):
            return
        # A stretch that reduceat adds up ends where the next begins, and what lies beyond the last column is cut off.
        begins, value = edges[where], value[: edges[-1]]
        self.total[row, where] += np.add.reduceat(value, begins) * weight
        self.count[row, where] += (edges[where + 1] - begins) * weight
        self.most[row, where] = np.maximum(self.most[row, where], np.maximum.reduceat(value, begins))

    def grid(self) -> Grid:
        with np.errstate(invalid="ignore"):
            mean = self.total / self.count
        return Grid(self.start, self.width, mean, np.where(self.count > 0, self.most, np.nan))


def _add_chunks(gathering: _Gathering, place: dict[int, int], name: str, weight: int, start: int, end: int) -> None:
    owners = [gpu_owner(gpu_id) for gpu_id in place]
    rows = {series_id: place[owners[i][1]] for series_id, i in ids_of(owners, name, Series.Column.VALUE).items()}
    if not rows:
        return
    there = Chunk.objects.filter(
        series__in=list(rows), kind=Chunk.Kind.MERGED, rank=0, last_step__gte=start, first_step__lt=end
    )
    of = {
        chunk_id: rows[series_id] for chunk_id, series_id in there.order_by("first_step").values_list("id", "series_id")
    }
    # A row at once: a numpy call on each of thousands of chunks would cost more than what it does.
    opened: dict[int, list[Points]] = defaultdict(list)
    data = {chunk_id: data for chunk_id, _, data in data_of(list(of))}
    for chunk_id, row in of.items():
        opened[row].append(decode_merged(data.pop(chunk_id), times=False))
    for row, parts in opened.items():
        step, value = np.concatenate([one.step for one in parts]), np.concatenate([one.value for one in parts])
        if not (step[1:] >= step[:-1]).all():  # what came late lies within what was there
            order = np.argsort(step, kind="stable")
            step, value = step[order], value[order]
        step, value = gathering.inside(row, step, value, weight)
        gathering.add(row, *_spread(step, value, weight, gathering.width))


def _spread(step: Integers, value: Floats, seconds: int, width: int) -> tuple[Integers, Floats, int]:
    """Stretches that are longer than a column, cut into pieces that are not; and how long a piece is."""
    pieces = -(-seconds // width)
    if pieces == 1:
        return step, value, seconds
    length = -(-seconds // pieces)
    return (step[:, None] + length * np.arange(pieces)).reshape(-1), np.repeat(value, pieces), length


def _add_frames(gathering: _Gathering, place: dict[int, int], name: str, start: int, end: int) -> None:
    """What is not merged yet."""
    agents = Agent.objects.filter(gpus__in=list(place)).distinct().values_list("pk", flat=True)
    fresh = Frame.objects.filter(agent__in=list(agents), at__gt=start - LONGEST_S, at__lt=end, until__gt=start)
    for data in fresh.values_list("data", flat=True):
        one = frames.decode(bytes(data))
        step = one.seconds
        for at, gpu_id in enumerate(one.gpus):
            if gpu_id in place:
                value = one.values[PLACE[name], at].astype(np.float64)
                told = value != MISSING
                row = place[gpu_id]
                gathering.add(row, *gathering.inside(row, step[told], value[told], 1), 1)
