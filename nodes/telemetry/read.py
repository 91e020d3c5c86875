"""Reading what machines did: each second of the last two days, minutes before, ten minutes before that, as one curve.

What has only just come lies in frames, which hold all of a machine's series together: they are opened once a look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nodes.models import Agent, Frame
from nodes.telemetry import frames
from nodes.telemetry.fields import LONGEST_S, PLACE, gpu_owner, host_owner
from nodes.telemetry.thin import LEVELS, Level, thinned
from nodes.telemetry.wire import MISSING, Values
from portal.models import Series
from portal.series.codec import EMPTY, Integers, Points
from portal.series.envelope import Outline, concatenate, of_points, thin
from portal.series.read import Reading, ids_of, patiently
from portal.series.store import Owner

Key = tuple[Owner, str]


@dataclass(frozen=True)
class Curve:
    """A series between two moments, in at most about so many stretches: see Outline for what a stretch has."""

    name: str
    outline: Outline


def curves(agent: Agent, wanted: Sequence[Key], *, start: int, end: int, points: int | None) -> dict[Key, Curve]:
    """These series of one machine and its GPUs, from `start` to `end` (Unix seconds, both included)."""
    tails = _tails(agent, wanted, start, end)
    found = {}
    for owner, name in wanted:
        outline = patiently(lambda: _outline(agent, owner, name, start, end, points))  # noqa: B023
        tail = tails.get((owner, name), EMPTY)
        newer = tail.step > (outline.last.max() if len(outline.last) else -1)
        pieces = [outline, of_points(tail.take(newer), np.zeros(int(newer.sum()), np.int64))]
        outline = concatenate(pieces)
        found[owner, name] = Curve(name, outline if points is None else thin(outline, points))
    return found


def gpu_curve(agent: Agent, gpu_id: int, name: str, *, start: int, end: int, points: int | None = 1_000) -> Curve:
    key = (gpu_owner(gpu_id), name)
    return curves(agent, [key], start=start, end=end, points=points)[key]


def host_curve(agent: Agent, name: str, *, start: int, end: int, points: int | None = 1_000) -> Curve:
    key = (host_owner(agent.pk), name)
    return curves(agent, [key], start=start, end=end, points=points)[key]


def names(owner: Owner, newest: Sequence[str] = ()) -> list[str]:
    """What is known of an owner, whatever it is kept in; `newest`: what frames alone may have."""
    kind, number = owner
    there = Series.objects.filter(owner_kind=kind, owner_id=number, column="").order_by("name")
    told = {name.partition("@")[0] for name in there.values_list("name", flat=True)}
    return sorted(told | set(newest))


def _outline(agent: Agent, owner: Owner, name: str, start: int, end: int, points: int | None) -> Outline:
    """What chunks have of it: the thinned stretches first, then the seconds."""
    pieces = [_thinned(level, owner, name, start, end) for level in reversed(LEVELS)]
    reading = Reading([owner], name, ids_of([owner], name), start=start, end=end, times=False)
    reading.look()
    if points is not None and reading.is_long(points):
        pieces.append(reading.outline())
    else:
        exact = of_points(*reading.exact())
        pieces.append(exact if points is None else thin(exact, points))
    return concatenate([piece for piece in pieces if len(piece.first)] or pieces[-1:])


def _thinned(level: Level, owner: Owner, name: str, start: int, end: int) -> Outline:
    """Stretches of a level as an outline; nothing where there are none."""
    source = thinned(name, level.seconds)
    columns = {}
    for column in (Series.Column.VALUE, Series.Column.MIN, Series.Column.MAX):
        ids = ids_of([owner], source, column)
        if not ids:
            return of_points(EMPTY, np.zeros(0, np.int64))
        reading = Reading([owner], source, ids, start=start, end=end, times=False)
        reading.look()
        columns[column], _ = reading.exact()
    mean, low, high = columns.values()
    if not len(mean) == len(low) == len(high):  # a thinning came in between
        low = high = mean
    n = np.full(len(mean), level.seconds, np.int64)
    finite = np.where(np.isfinite(mean.value), n, 0)
    return Outline(
        first=mean.step, last=mean.step + level.seconds - 1, time=mean.time, n=n, finite=finite, min=low.value,
        max=high.value, sum=np.where(finite, mean.value, 0.0) * finite, source=np.zeros(len(mean), np.int64),
    )  # fmt: skip


def _tails(agent: Agent, wanted: Sequence[Key], start: int, end: int) -> Mapping[Key, Points]:
    """These series' points in frames, between these moments."""
    rows = Frame.objects.filter(agent=agent, at__gte=start - LONGEST_S, at__lte=end, until__gt=start)
    tails: dict[Key, list[Points]] = {}
    for data in rows.order_by("at", "id").values_list("data", flat=True):
        one = frames.decode(bytes(data))
        second = one.seconds
        place = {gpu_owner(gpu): row for row, gpu in enumerate(one.gpus)}
        for key in wanted:
            owner, name = key
            if owner in place and name in PLACE:
                _add(tails, key, second, one.values[PLACE[name], place[owner]], start, end)
            elif owner == host_owner(agent.pk) and name in one.host and start <= one.at <= end:
                step = np.array([one.at], np.int64)
                tails.setdefault(key, []).append(Points(step, step.astype(np.float64), np.array([one.host[name]])))
    return {key: _joined(parts) for key, parts in tails.items()}


def _add(tails: dict[Key, list[Points]], key: Key, second: Integers, values: Values, start: int, end: int) -> None:
    told = (values != MISSING) & (second >= start) & (second <= end)
    if told.any():
        step = second[told]
        tails.setdefault(key, []).append(Points(step, step.astype(np.float64), values[told].astype(np.float64)))


def _joined(parts: Sequence[Points]) -> Points:
    step, value = np.concatenate([p.step for p in parts]), np.concatenate([p.value for p in parts])
    step, first = np.unique(step[::-1], return_index=True)  # of the same second, what came last
    value = value[::-1][first]
    return Points(step, step.astype(np.float64), value)
