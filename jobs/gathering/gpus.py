"""What a job's GPUs did: one field as rows × time, over all its nodes and attempts, and where that is known from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from jobs import allocations
from jobs.intake.reports import owner_of
from jobs.listing.sight import sight
from jobs.models import Attempt, Job, Stream
from nodes.models import Holding
from nodes.telemetry.fields import GPU_FIELDS
from nodes.telemetry.grid import Grid, Stretch, grid
from portal.models import User
from portal.series.codec import Floats
from portal.series.read import curve

# What launchers log of all their GPUs together, by the agent's word, and the factor between them.
_BY_LAUNCHER = {
    "gpu_percent": ("gpu_percent", 1.0),
    "memory_mib": ("gpu_memory_gib", 1024.0),
    "watts": ("gpu_watts", 1.0),
}
AGENT, LAUNCHER = "agent", "launcher"
MOST_NODES = 512


@dataclass(frozen=True)
class Row:
    """One GPU in the hands of one attempt; or, by its launcher's word, all of a node's together (`gpu` is None)."""

    attempt: int
    node: str
    gpu: int | None
    uuid: str
    since: datetime
    until: datetime | None
    mean: Floats  # a value a column; NaN where nothing is told
    most: Floats


@dataclass(frozen=True)
class Heat:
    """Rows in order of attempt, node and GPU. Column i begins at `start + i × width` (Unix seconds)."""

    source: str  # AGENT, LAUNCHER, or "" where nothing is known
    field: str
    start: int
    width: int
    columns: int
    rows: list[Row]

    @property
    def mean(self) -> float | None:
        """Over all rows and times."""
        told = np.concatenate([row.mean for row in self.rows]) if self.rows else np.zeros(0)
        told = told[np.isfinite(told)]
        return float(told.mean()) if len(told) else None


def fields(source: str) -> tuple[str, ...]:
    """What can be asked for."""
    return tuple(_BY_LAUNCHER) if source == LAUNCHER else GPU_FIELDS


def heat(
    job: Job,
    field: str,
    *,
    start: int | None = None,
    end: int | None = None,
    columns: int = 240,
    now: float | None = None,
    user: User | None = None,
) -> Heat:
    """From the agents of its nodes where they tell anything of its GPUs, else from what its launchers logged.

    With `user` no column tells what of these GPUs is none of that person's business.
    """
    attempts = [one for one in Attempt.objects.filter(job=job).order_by("number") if one.started_at is not None]
    now = time.time() if now is None else now
    begin, stop = _span(attempts, now)
    start, end = begin if start is None else start, stop if end is None else end
    by_agent = _by_agent(attempts, field, start, end, columns, user)
    if by_agent.rows or field not in _BY_LAUNCHER:
        return by_agent
    return _by_launcher(attempts, field, start, end, columns)


def _span(attempts: Sequence[Attempt], now: float) -> tuple[int, int]:
    """From the first start to the last end."""
    begin = min((one.started_at.timestamp() for one in attempts if one.started_at), default=now)
    ends = [one.ended_at.timestamp() if one.ended_at else now for one in attempts]
    return int(begin), int(max(ends, default=now)) + 1


def _by_agent(attempts: Sequence[Attempt], field: str, start: int, end: int, columns: int, user: User | None) -> Heat:
    held = allocations.held_by(attempts)
    gpu_ids = sorted({one.gpu_id for mine in held.values() for one in mine})
    within = _within(attempts, held)
    found = grid(gpu_ids, field, start=start, end=max(end, start + 1), columns=columns, within=within)
    if user is not None:
        found = sight(user, gpu_ids, start, start + found.width * columns).grid(gpu_ids, found)
    place = {gpu_id: row for row, gpu_id in enumerate(gpu_ids)}
    rows = []
    for attempt in attempts:
        by_gpu: dict[int, list[Holding]] = {}
        for one in held.get(attempt.pk, ()):
            by_gpu.setdefault(one.gpu_id, []).append(one)
        rows += [_row(attempt, mine, found, place[gpu_id]) for gpu_id, mine in by_gpu.items()]
    told = any(np.isfinite(row.mean).any() for row in rows)
    return Heat(AGENT if told else "", field, found.start, found.width, found.mean.shape[1], rows if told else [])


def _row(attempt: Attempt, held: Sequence[Holding], found: Grid, place: int) -> Row:
    """What one GPU did while an attempt held it, perhaps with breaks."""
    begins = found.start + found.width * np.arange(found.mean.shape[1])
    mine = np.zeros(len(begins), np.bool_)
    for since, until in _stretches(attempt, held):
        mine |= (begins + found.width > since) & (begins < until)
    mean, most = (np.where(mine, part[place], np.nan) for part in (found.mean, found.maximum))
    first, last = held[0], held[-1]
    over = last.until or attempt.ended_at
    return Row(attempt.number, first.agent.node, first.gpu.index, first.gpu.uuid, first.since, over, mean, most)


def _within(attempts: Sequence[Attempt], held: Mapping[int, Sequence[Holding]]) -> dict[int, list[Stretch]]:
    """When each GPU was the job's: what others did with it before and after is not the job's."""
    found: dict[int, list[Stretch]] = {}
    for attempt in attempts:
        for one in held.get(attempt.pk, ()):
            found.setdefault(one.gpu_id, []).extend(_stretches(attempt, [one]))
    return found


def _stretches(attempt: Attempt, held: Iterable[Holding]) -> Iterator[Stretch]:
    """From when until when an attempt had what it held."""
    began = attempt.started_at.timestamp() if attempt.started_at else 0.0
    for one in held:
        ends = [moment.timestamp() for moment in (one.until, attempt.ended_at) if moment is not None]
        yield max(one.since.timestamp(), began), min(ends, default=np.inf)


def _by_launcher(attempts: Sequence[Attempt], field: str, start: int, end: int, columns: int) -> Heat:
    name, factor = _BY_LAUNCHER[field]
    width = max(1, -(-(end - start) // columns))
    count = max(1, -(-(end - start) // width))
    rows = []
    for attempt in attempts:
        launchers = Stream.objects.filter(attempt=attempt, rank__lt=0).order_by("-rank")
        for rank, node in launchers.values_list("rank", "node").distinct()[:MOST_NODES]:
            read = curve([owner_of(attempt.pk)], name, rank=rank, points=columns * 4)
            values = read.value if read.value is not None else read.mean
            if values is None or not len(values):
                continue
            mean = _binned(read.time, values * factor, start, width, count)
            since = attempt.started_at or attempt.created_at
            if np.isfinite(mean).any():
                rows.append(Row(attempt.number, node, None, "", since, attempt.ended_at, mean, mean))
    return Heat(LAUNCHER if rows else "", field, start, width, count, rows)


def _binned(at: Floats, value: Floats, start: int, width: int, count: int) -> Floats:
    column = ((at - start) // width).astype(np.int64)
    inside = (column >= 0) & (column < count) & np.isfinite(value)
    total = np.bincount(column[inside], value[inside], count)
    with np.errstate(invalid="ignore"):
        mean: Floats = total / np.bincount(column[inside], minlength=count)
    return mean
