"""Read one field of many GPUs over a time span as a grid of GPUs × columns, for heat maps and usage maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nodes.models import Agent, Frame
from nodes.telemetry import frames
from nodes.telemetry.fields import MAX_SPAN_S, PLACE, gpu_owner
from nodes.telemetry.thin import LEVELS, thinned
from nodes.telemetry.wire import MISSING, Values
from portal.models import Series
from portal.series.codec import Floats, Integers, concatenated
from portal.series.read import ids_of
from portal.series.rows import LAST_STEP, merged_of

Stretch = tuple[float, float]  # Unix seconds


@dataclass
class Grid:
    """Means and maxima, GPUs × columns; NaN where there is no data. Column i begins at `start + i × width`."""

    start: int
    width: int
    mean: Floats
    maximum: Floats


def grid(
    gpu_ids: Sequence[int],
    name: str,
    *,
    start: int,
    end: int,
    columns: int,
    within: Mapping[int, Sequence[Stretch]] | None = None,
) -> Grid:
    """Return the field of these GPUs from `start` to `end` (Unix seconds), in at most `columns` of whole seconds.

    With `within`, a GPU counts only in its stretches, however long a column is.
    """
    width = max(1, -(-(end - start) // max(1, columns)))
    builder = _GridBuilder(len(gpu_ids), start, width, -(-(end - start) // width))
    place = {gpu_id: row for row, gpu_id in enumerate(gpu_ids)}
    if within is not None:
        builder.within = {place[gpu_id]: list(stretches) for gpu_id, stretches in within.items()}
    for seconds in (level.seconds for level in reversed(LEVELS)):
        _add_chunks(builder, place, thinned(name, seconds), seconds, start, end)
    _add_chunks(builder, place, name, 1, start, end)
    _add_frames(builder, place, name, start, end)
    return builder.grid()


class _GridBuilder:
    def __init__(self, rows: int, start: int, width: int, columns: int) -> None:
        self.start, self.width, self.columns = start, width, columns
        self.total, self.count = np.zeros((rows, columns)), np.zeros((rows, columns))
        self.maximum = np.full((rows, columns), -np.inf)
        self.within: dict[int, list[Stretch]] | None = None

    def add(self, row: int, step: Integers, value: Floats, seconds: int) -> None:
        """Add points of one GPU in any order, each of which stands for `seconds`."""
        if not (step[1:] >= step[:-1]).all():  # late points lie between earlier ones
            order = np.argsort(step, kind="stable")
            step, value = step[order], value[order]
        if self.within is not None:
            slices = _inside(step, seconds, self.within.get(row, ()))
            step, value = _picked(step, slices), _picked(value, slices)
        if not (finite := np.isfinite(value)).all():
            step, value = step[finite], value[finite]
        self._add(row, *_spread(step, value, seconds, self.width))

    def _add(self, row: int, step: Integers, value: Floats, weight: int) -> None:
        edges = np.searchsorted(step, self.start + self.width * np.arange(self.columns + 1))
        where = np.flatnonzero(edges[1:] > edges[:-1])
        if not len(where):
            return
        # reduceat sums from one start to the next; values beyond the last column are cut off.
        begins, value = edges[where], value[: edges[-1]]
        self.total[row, where] += np.add.reduceat(value, begins) * weight
        self.count[row, where] += (edges[where + 1] - begins) * weight
        self.maximum[row, where] = np.maximum(self.maximum[row, where], np.maximum.reduceat(value, begins))

    def grid(self) -> Grid:
        with np.errstate(invalid="ignore"):
            mean = self.total / self.count
        return Grid(self.start, self.width, mean, np.where(self.count > 0, self.maximum, np.nan))


def _inside(step: Integers, seconds: int, stretches: Sequence[Stretch]) -> list[slice]:
    """Return the slices of points whose middle is within a stretch."""
    first_steps = np.ceil(np.array(stretches, np.float64).reshape(-1, 2) - seconds / 2)
    edges = np.searchsorted(step, np.clip(first_steps, 0, LAST_STEP).astype(np.int64))
    found: list[slice] = []
    for first, end in sorted(edges.tolist()):
        if found and first <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(end, found[-1].stop))
        else:
            found.append(slice(first, end))
    return found


def _picked(column: NDArray[Any], which: Sequence[slice]) -> NDArray[Any]:
    if len(which) == 1:
        return column[which[0]]  # a view, without copying: the usual case
    return np.concatenate([column[:0], *(column[part] for part in which)])


def _add_chunks(builder: _GridBuilder, place: dict[int, int], name: str, seconds: int, start: int, end: int) -> None:
    owners = [gpu_owner(gpu_id) for gpu_id in place]
    rows = {series_id: place[owners[i][1]] for series_id, i in ids_of(owners, name, Series.Column.VALUE).items()}
    for series_id, step, value in concatenated(merged_of(list(rows), 0, start, end - 1)):
        builder.add(rows[series_id], step, value, seconds)


def _spread(step: Integers, value: Floats, seconds: int, width: int) -> tuple[Integers, Floats, int]:
    """Cut stretches longer than a column into pieces; return them with the length of a piece."""
    pieces = -(-seconds // width)
    if pieces == 1:
        return step, value, seconds
    length = -(-seconds // pieces)
    return (step[:, None] + length * np.arange(pieces)).reshape(-1), np.repeat(value, pieces), length


def _add_frames(builder: _GridBuilder, place: dict[int, int], name: str, start: int, end: int) -> None:
    """Add what is not merged into chunks yet."""
    agents = Agent.objects.filter(gpus__in=list(place)).distinct().values_list("pk", flat=True)
    fresh = Frame.objects.filter(agent__in=list(agents), at__gt=start - MAX_SPAN_S, at__lt=end, until__gt=start)
    parts: dict[int, list[tuple[Integers, Values]]] = defaultdict(list)
    for data in fresh.order_by("at").values_list("data", flat=True):
        frame = frames.decode(bytes(data))
        step, values = frame.seconds, frame.values[PLACE[name]]
        for gpu_id, value in zip(frame.gpus, values, strict=True):
            if gpu_id in place:
                parts[gpu_id].append((step, value))
    for gpu_id, points in parts.items():
        step, value = np.concatenate([step for step, _ in points]), np.concatenate([value for _, value in points])
        builder.add(place[gpu_id], step, np.where(value == MISSING, np.nan, value), 1)
