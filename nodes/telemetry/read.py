"""Read a machine's history as one curve: seconds for two days, then minutes, then ten minutes.

The newest values are in frames, which contain all of a machine's series: each is decoded once per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nodes.models import Agent, Frame
from nodes.telemetry import frames
from nodes.telemetry.fields import MAX_SPAN_S, PLACE, gpu_owner, host_owner
from nodes.telemetry.thin import LEVELS, ThinningLevel, thinned
from nodes.telemetry.wire import MISSING, Values
from portal.models import Series
from portal.series.codec import EMPTY, Integers, Points
from portal.series.envelope import Outline, concatenate, of_points, thin
from portal.series.read import SeriesReading, ids_of, retry_if_moved
from portal.series.store import Owner

SeriesKey = tuple[Owner, str]


@dataclass(frozen=True)
class TelemetryCurve:
    """A series between two moments, in a limited number of stretches; see Outline for their content."""

    name: str
    outline: Outline


def curves(
    agent: Agent, wanted: Sequence[SeriesKey], *, start: int, end: int, points: int | None
) -> dict[SeriesKey, TelemetryCurve]:
    """Return these series of one machine and its GPUs, from `start` to `end` (Unix seconds, inclusive)."""
    tails = _tails(agent, wanted, start, end)
    found = {}
    for owner, name in wanted:
        outline = retry_if_moved(lambda: _outline(agent, owner, name, start, end, points))  # noqa: B023
        tail = tails.get((owner, name), EMPTY)
        newer = tail.step > (outline.last.max() if len(outline.last) else -1)
        pieces = [outline, of_points(tail.take(newer), np.zeros(int(newer.sum()), np.int64))]
        outline = concatenate(pieces)
        found[owner, name] = TelemetryCurve(name, outline if points is None else thin(outline, points))
    return found


def names(owner: Owner, newest: Sequence[str] = ()) -> list[str]:
    """Return the names of an owner's series at any resolution; `newest` adds those that only frames may have."""
    kind, number = owner
    rows = Series.objects.filter(owner_kind=kind, owner_id=number, column="").order_by("name")
    stored = {name.partition("@")[0] for name in rows.values_list("name", flat=True)}
    return sorted(stored | set(newest))


def _outline(agent: Agent, owner: Owner, name: str, start: int, end: int, points: int | None) -> Outline:
    """Return the series from chunks: downsampled stretches first, then seconds."""
    pieces = [_thinned(level, owner, name, start, end) for level in reversed(LEVELS)]
    reading = SeriesReading([owner], name, ids_of([owner], name), start=start, end=end, times=False)
    reading.load()
    if points is not None and reading.is_long(points):
        pieces.append(reading.outline())
    else:
        exact = of_points(*reading.exact())
        pieces.append(exact if points is None else thin(exact, points))
    return concatenate([piece for piece in pieces if len(piece.first)] or pieces[-1:])


def _thinned(level: ThinningLevel, owner: Owner, name: str, start: int, end: int) -> Outline:
    """Return a level's stretches as an outline; empty if there are none."""
    source = thinned(name, level.seconds)
    columns = {}
    for column in (Series.Column.VALUE, Series.Column.MIN, Series.Column.MAX):
        ids = ids_of([owner], source, column)
        if not ids:
            return of_points(EMPTY, np.zeros(0, np.int64))
        reading = SeriesReading([owner], source, ids, start=start, end=end, times=False)
        reading.load()
        columns[column], _ = reading.exact()
    mean, low, high = columns.values()
    if not len(mean) == len(low) == len(high):  # downsampling ran in between
        low = high = mean
    n = np.full(len(mean), level.seconds, np.int64)
    finite = np.where(np.isfinite(mean.value), n, 0)
    return Outline(
        first=mean.step, last=mean.step + level.seconds - 1, time=mean.time, n=n, finite=finite, min=low.value,
        max=high.value, sum=np.where(finite, mean.value, 0.0) * finite, source=np.zeros(len(mean), np.int64),
    )  # fmt: skip


def _tails(agent: Agent, wanted: Sequence[SeriesKey], start: int, end: int) -> Mapping[SeriesKey, Points]:
    """Return the points of these series in frames, between these moments."""
    rows = Frame.objects.filter(agent=agent, at__gte=start - MAX_SPAN_S, at__lte=end, until__gt=start)
    tails: dict[SeriesKey, list[Points]] = {}
    for data in rows.order_by("at", "id").values_list("data", flat=True):
        frame = frames.decode(bytes(data))
        second = frame.seconds
        row_of = {gpu_owner(gpu): row for row, gpu in enumerate(frame.gpus)}
        for key in wanted:
            owner, name = key
            if owner in row_of and name in PLACE:
                _add(tails, key, second, frame.values[PLACE[name], row_of[owner]], start, end)
            elif owner == host_owner(agent.pk) and name in frame.host and start <= frame.at <= end:
                step = np.array([frame.at], np.int64)
                tails.setdefault(key, []).append(Points(step, step.astype(np.float64), np.array([frame.host[name]])))
    return {key: _joined(parts) for key, parts in tails.items()}


def _add(
    tails: dict[SeriesKey, list[Points]], key: SeriesKey, second: Integers, values: Values, start: int, end: int
) -> None:
    is_wanted = (values != MISSING) & (second >= start) & (second <= end)
    if is_wanted.any():
        step = second[is_wanted]
        tails.setdefault(key, []).append(Points(step, step.astype(np.float64), values[is_wanted].astype(np.float64)))


def _joined(parts: Sequence[Points]) -> Points:
    step, value = np.concatenate([p.step for p in parts]), np.concatenate([p.value for p in parts])
    step, first = np.unique(step[::-1], return_index=True)  # the last value of each second
    value = value[::-1][first]
    return Points(step, step.astype(np.float64), value)
