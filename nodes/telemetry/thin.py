"""Downsample old samples: seconds are kept for 48 h, minutes for 90 days, ten minutes for two years.

1,024 minutes of a machine are downsampled at once: they are 60 whole windows of 1,024 s, and ten times that is 1,024
times ten minutes. A downsampled series has its interval in its name ("watts@60") and three columns: mean, min and max.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet

from nodes.models import Agent, Frame, GpuPlace, HealthEntry, Holding, NodeEvent, RackTemperature
from nodes.telemetry.fields import WINDOW_S, gpu_owner, host_owner
from portal.bulk import give_way
from portal.models import Chunk, Series
from portal.series import store
from portal.series.codec import Floats, Integers, Points, decode_merged
from portal.series.rows import merge
from portal.series.store import Owner

HOUR_S, DAY_S = 3600, 86_400
Column = Series.Column


@dataclass(frozen=True)
class ThinningLevel:
    """A downsampling level: intervals of `seconds`, made from data older than `after_s`."""

    seconds: int
    after_s: int
    made_of: int  # seconds per value of its source
    marker: str  # the column of Agent with its progress

    @property
    def block_s(self) -> int:
        return WINDOW_S * self.seconds


MINUTES = ThinningLevel(seconds=60, after_s=48 * HOUR_S, made_of=1, marker="minutes_to")
TENS = ThinningLevel(seconds=600, after_s=90 * DAY_S, made_of=60, marker="tens_to")
LEVELS = (MINUTES, TENS)
RETENTION_S = 730 * DAY_S
MAX_DELETED = 500
"""Rows per transaction."""
PRECISION = 64
"""Means are rounded to this fraction of a unit: values are measured in whole degrees, watts and per cent, and the bits
below would take 50 % more space."""


def thinned(name: str, seconds: int) -> str:
    """Return a series' name at a level: "watts", "watts@60"."""
    return name if seconds == 1 else f"{name}@{seconds}"


def thin(budget_s: float = 10.0, *, now: float | None = None) -> int:
    """Downsample old data for about `budget_s`; return how many series were changed."""
    deadline, moment = time.monotonic() + budget_s, time.time() if now is None else now
    done = 0
    for level in LEVELS:
        for agent in _due_agents(level, moment):
            for owner in owners_of(agent):
                done += _thin_owner(level, owner, _old_before(level, moment))
            Agent.objects.filter(pk=agent.pk).update(**{level.marker: _old_before(level, moment)})
            if time.monotonic() > deadline:
                return done
    return done


def forget(*, now: float | None = None) -> int:
    """Delete data beyond retention; return how many chunks were deleted."""
    end = int((time.time() if now is None else now) - RETENTION_S)
    moment = datetime.fromtimestamp(max(0, end), UTC)
    _forget_events(moment)
    _delete(Holding.objects.filter(until__lt=moment).order_by("until"))
    RackTemperature.objects.filter(hour__lt=moment).delete()
    earlier = GpuPlace.objects.filter(gpu=OuterRef("gpu"), pk__lt=OuterRef("pk"))  # a GPU's first place decides whose
    places = GpuPlace.objects.filter(Exists(earlier), until__lt=moment)  # it is (nodes.telemetry.machines)
    _delete(places.order_by())
    cleared = HealthEntry.objects.filter(state=HealthEntry.EntryState.CLEARED, cleared_at__lt=moment)
    _delete(cleared.order_by("cleared_at"))
    deleted = 0
    for agent in Agent.objects.only("pk"):
        for owner in owners_of(agent):
            ids = list(_series(owner).values_list("pk", flat=True))
            deleted += Chunk.objects.filter(series__in=ids, kind=Chunk.Kind.MERGED, rank=0, last_step__lt=end).delete()[
                0
            ]
    return deleted


def _forget_events(before: datetime) -> None:
    """Delete events that ended before this moment.

    Their numbers grow about as their times do, so this reads the oldest and stops where they are recent. An index by
    their ends would have to be written with every event.
    """
    events, last = NodeEvent.objects.order_by("pk"), 0
    while rows := list(events.filter(pk__gt=last).values_list("pk", "at", "last_at", "is_open")[:MAX_DELETED]):
        began = time.monotonic()
        NodeEvent.objects.filter(pk__in=[pk for pk, _, end, is_open in rows if end < before and not is_open]).delete()
        if all(at >= before for _, at, _, _ in rows):
            return
        last = rows[-1][0]
        give_way(began)


def _delete(rows: QuerySet[Any]) -> None:
    """Delete the rows in short transactions, and let other writers go first in between."""
    while keys := list(rows.values_list("pk", flat=True)[:MAX_DELETED]):
        began = time.monotonic()
        rows.model._default_manager.filter(pk__in=keys).delete()
        give_way(began)


def owners_of(agent: Agent) -> Iterator[Owner]:
    """Yield the owners of a machine's series."""
    yield host_owner(agent.pk)
    for gpu_id in agent.gpus.values_list("pk", flat=True):
        yield gpu_owner(gpu_id)


def _old_before(level: ThinningLevel, now: float) -> int:
    """Return the time before which data is old, at a whole number of blocks."""
    return int(now - level.after_s) // level.block_s * level.block_s


def _due_agents(level: ThinningLevel, now: float) -> Sequence[Agent]:
    """Return machines with data to downsample; unmerged frames must be merged first."""
    end = _old_before(level, now)
    unmerged = Frame.objects.filter(agent=OuterRef("pk"), at__lt=end)
    due = Agent.objects.filter(~Exists(unmerged), **{f"{level.marker}__lt": end})
    return list(due.only("pk", level.marker))


def _series(owner: Owner) -> Any:
    kind, number = owner
    return Series.objects.filter(owner_kind=kind, owner_id=number)


def _thin_owner(level: ThinningLevel, owner: Owner, end: int) -> int:
    suffix = "" if level.made_of == 1 else f"@{level.made_of}"
    names = {name.removesuffix(suffix) for name in _series(owner).values_list("name", flat=True) if _is_of(name, level)}
    return sum(_thin_series(level, owner, name, end) for name in sorted(names))


def _is_of(name: str, level: ThinningLevel) -> bool:
    return "@" not in name if level.made_of == 1 else name.endswith(f"@{level.made_of}")


def _thin_series(level: ThinningLevel, owner: Owner, name: str, end: int) -> int:
    """Replace one series' old chunks, in one transaction, by a mean, a min and a max per interval."""
    source = thinned(name, level.made_of)
    columns = (Column.VALUE,) if level.made_of == 1 else (Column.VALUE, Column.MIN, Column.MAX)
    ids = {column: store.find(owner, [source], column=column).get(source) for column in columns}
    old = {column: _old_chunks(series_id, end) for column, series_id in ids.items() if series_id is not None}
    mean = _decoded(old.get(Column.VALUE, []))
    if not len(mean):
        return 0
    low, high = (_decoded(old.get(column, [])) if level.made_of > 1 else mean for column in (Column.MIN, Column.MAX))
    rows = []
    for column, points in _downsampled(level, mean, low, high).items():
        series_id = store.declare(owner, [thinned(name, level.seconds)], column=column)[thinned(name, level.seconds)]
        rows += [store.merged_row(series_id, 0, 0, part) for part in _blocks(level, points)]
    with transaction.atomic():
        replaced = [pk for chunks in old.values() for pk, _ in chunks]
        if Chunk.objects.filter(pk__in=replaced).delete()[0] == len(replaced):  # else another process did the same
            store.insert(rows)
        else:
            transaction.set_rollback(True)
    return 1


def _old_chunks(series_id: int, end: int) -> list[tuple[int, bytes]]:
    chunks = Chunk.objects.filter(series=series_id, kind=Chunk.Kind.MERGED, rank=0, last_step__lt=end).order_by("id")
    return [(pk, bytes(data)) for pk, data in chunks.values_list("pk", "data")]


def _decoded(chunks: Sequence[tuple[int, bytes]]) -> Points:
    return merge([(decode_merged(data), 0) for _, data in chunks])[0]


def _downsampled(level: ThinningLevel, mean: Points, low: Points, high: Points) -> dict[str, Points]:
    """Return a point per interval over its finite values; NaN if there are none."""
    first = mean.step // level.seconds * level.seconds
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    finite = np.isfinite(mean.value)
    with np.errstate(invalid="ignore"):
        total = np.add.reduceat(np.where(finite, mean.value, 0.0), starts)
        average = total / np.add.reduceat(finite.astype(np.int64), starts)
    average = np.rint(average * PRECISION) / PRECISION
    step = first[starts]
    return {
        Column.VALUE: _points(step, average),
        Column.MIN: _points(*_extreme(level, low, np.fmin)),
        Column.MAX: _points(*_extreme(level, high, np.fmax)),
    }


def _extreme(level: ThinningLevel, points: Points, pick: np.ufunc) -> tuple[Integers, Floats]:
    first = points.step // level.seconds * level.seconds
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    return first[starts], pick.reduceat(points.value, starts)


def _points(step: Integers, value: Floats) -> Points:
    return Points(step, np.full(len(step), float(step[0])), value)


def _blocks(level: ThinningLevel, points: Points) -> Iterator[Points]:
    """Split at block boundaries, so that the next level finds whole chunks."""
    block = points.step // level.block_s
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(points)]
    for begin, end in zip(edges, edges[1:], strict=False):
        yield points.take(slice(begin, end))
