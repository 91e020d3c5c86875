"""What is old is kept in less: a value a second for 48 h, minutes for 90 days, ten minutes for two years.

1,024 minutes of a machine are thinned at once: they are 60 whole windows of 1,024 s, and ten of them 1,024 times ten
minutes. A thinned series has its length in its name ("watts@60") and three columns: mean, min and max.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db import transaction
from django.db.models import Exists, OuterRef

from nodes.models import Agent, Frame, Holding, NodeEvent
from nodes.telemetry.fields import WINDOW_S, gpu_owner, host_owner
from portal.models import Chunk, Series
from portal.series import store
from portal.series.codec import Floats, Integers, Points, decode_merged
from portal.series.rows import merge
from portal.series.store import Owner

HOUR_S, DAY_S = 3600, 86_400
Column = Series.Column


@dataclass(frozen=True)
class Level:
    """One step of thinning: stretches of `seconds`, made of what is older than `after_s`."""

    seconds: int
    after_s: int
    made_of: int  # seconds of a value before
    marker: str  # the column of Agent up to where it has come

    @property
    def block_s(self) -> int:
        return WINDOW_S * self.seconds


MINUTES = Level(seconds=60, after_s=48 * HOUR_S, made_of=1, marker="minutes_to")
TENS = Level(seconds=600, after_s=90 * DAY_S, made_of=60, marker="tens_to")
LEVELS = (MINUTES, TENS)
FORGOTTEN_S = 730 * DAY_S
FINENESS = 64
"""Means are kept to so many parts of a unit: what is measured in whole degrees, watts and per cent has no more to tell,
and the bits below would take half as much room again."""


def thinned(name: str, seconds: int) -> str:
    """A series' name at a level: "watts", "watts@60"."""
    return name if seconds == 1 else f"{name}@{seconds}"


def thin(budget_s: float = 10.0, *, now: float | None = None) -> int:
    """Thin what has become old, for about so long; answers how many series were."""
    deadline, moment = time.monotonic() + budget_s, time.time() if now is None else now
    done = 0
    for level in LEVELS:
        for agent in _behind(level, moment):
            for owner in owners_of(agent):
                done += _thin_owner(level, owner, _end(level, moment))
            Agent.objects.filter(pk=agent.pk).update(**{level.marker: _end(level, moment)})
            if time.monotonic() > deadline:
                return done
    return done


def forget(*, now: float | None = None) -> int:
    """Remove what is older than is kept at all; answers how many chunks went."""
    end = int((time.time() if now is None else now) - FORGOTTEN_S)
    moment = datetime.fromtimestamp(max(0, end), UTC)
    NodeEvent.objects.filter(last_at__lt=moment, is_open=False).delete()
    Holding.objects.filter(until__lt=moment).delete()
    gone = 0
    for agent in Agent.objects.only("pk"):
        for owner in owners_of(agent):
            ids = list(_series(owner).values_list("pk", flat=True))
            gone += Chunk.objects.filter(series__in=ids, kind=Chunk.Kind.MERGED, rank=0, last_step__lt=end).delete()[0]
    return gone


def owners_of(agent: Agent) -> Iterator[Owner]:
    """Whose series a machine's samples have become."""
    yield host_owner(agent.pk)
    for gpu_id in agent.gpus.values_list("pk", flat=True):
        yield gpu_owner(gpu_id)


def _end(level: Level, now: float) -> int:
    """What ends before this is old: a whole number of blocks."""
    return int(now - level.after_s) // level.block_s * level.block_s


def _behind(level: Level, now: float) -> Sequence[Agent]:
    """Machines that have something to thin. What is not merged yet is waited for."""
    end = _end(level, now)
    unmerged = Frame.objects.filter(agent=OuterRef("pk"), at__lt=end)
    due = Agent.objects.filter(~Exists(unmerged), **{f"{level.marker}__lt": end})
    return list(due.only("pk", level.marker))


def _series(owner: Owner) -> Any:
    kind, number = owner
    return Series.objects.filter(owner_kind=kind, owner_id=number)


def _thin_owner(level: Level, owner: Owner, end: int) -> int:
    suffix = "" if level.made_of == 1 else f"@{level.made_of}"
    names = {name.removesuffix(suffix) for name in _series(owner).values_list("name", flat=True) if _is_of(name, level)}
    return sum(_thin_series(level, owner, name, end) for name in sorted(names))


def _is_of(name: str, level: Level) -> bool:
    return "@" not in name if level.made_of == 1 else name.endswith(f"@{level.made_of}")


def _thin_series(level: Level, owner: Owner, name: str, end: int) -> int:
    """One curve's old chunks, replaced in one transaction by a mean, a min and a max a stretch."""
    source = thinned(name, level.made_of)
    columns = (Column.VALUE,) if level.made_of == 1 else (Column.VALUE, Column.MIN, Column.MAX)
    ids = {column: store.find(owner, [source], column=column).get(source) for column in columns}
    old = {column: _old(series_id, end) for column, series_id in ids.items() if series_id is not None}
    mean = _opened(old.get(Column.VALUE, []))
    if not len(mean):
        return 0
    low, high = (_opened(old.get(column, [])) if level.made_of > 1 else mean for column in (Column.MIN, Column.MAX))
    rows = []
    for column, points in _stretched(level, mean, low, high).items():
        series_id = store.declare(owner, [thinned(name, level.seconds)], column=column)[thinned(name, level.seconds)]
        rows += [store.merged_row(series_id, 0, 0, part) for part in _blocks(level, points)]
    with transaction.atomic():
        gone = [pk for chunks in old.values() for pk, _ in chunks]
        if Chunk.objects.filter(pk__in=gone).delete()[0] == len(gone):  # else somebody else was here
            store.insert(rows)
        else:
            transaction.set_rollback(True)
    return 1


def _old(series_id: int, end: int) -> list[tuple[int, bytes]]:
    chunks = Chunk.objects.filter(series=series_id, kind=Chunk.Kind.MERGED, rank=0, last_step__lt=end).order_by("id")
    return [(pk, bytes(data)) for pk, data in chunks.values_list("pk", "data")]


def _opened(chunks: Sequence[tuple[int, bytes]]) -> Points:
    return merge([(decode_merged(data), 0) for _, data in chunks])[0]


def _stretched(level: Level, mean: Points, low: Points, high: Points) -> dict[str, Points]:
    """A point a stretch, over what is finite in it: NaN where nothing is."""
    first = mean.step // level.seconds * level.seconds
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    finite = np.isfinite(mean.value)
    with np.errstate(invalid="ignore"):
        total = np.add.reduceat(np.where(finite, mean.value, 0.0), starts)
        average = total / np.add.reduceat(finite.astype(np.int64), starts)
    average = np.rint(average * FINENESS) / FINENESS
    step = first[starts]
    return {
        Column.VALUE: _points(step, average),
        Column.MIN: _points(*_extreme(level, low, np.fmin)),
        Column.MAX: _points(*_extreme(level, high, np.fmax)),
    }


def _extreme(level: Level, points: Points, pick: np.ufunc) -> tuple[Integers, Floats]:
    first = points.step // level.seconds * level.seconds
    starts = np.flatnonzero(np.diff(first, prepend=-1))
    return first[starts], pick.reduceat(points.value, starts)


def _points(step: Integers, value: Floats) -> Points:
    return Points(step, np.full(len(step), float(step[0])), value)


def _blocks(level: Level, points: Points) -> Iterator[Points]:
    """Cut at the blocks' ends, so that the next level finds whole chunks."""
    block = points.step // level.block_s
    edges = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(points)]
    for begin, end in zip(edges, edges[1:], strict=False):
        yield points.take(slice(begin, end))
