"""Read what a job's GPUs did: one field as rows × time, over all nodes and attempts, and the source of the data."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from jobs import allocations
from jobs.intake.reports import owner_of
from jobs.listing.telemetry_access import access_of
from jobs.models import Attempt, Job, Stream
from nodes.models import Holding
from nodes.telemetry.fields import GPU_FIELDS
from nodes.telemetry.grid import Grid, Stretch, grid
from portal.models import User
from portal.series.codec import Floats
from portal.series.read import curve

# Launcher series for all GPUs of a node, by the agent's name, and the factor between them.
_BY_LAUNCHER = {
    "gpu_percent": ("gpu_percent", 1.0),
    "memory_mib": ("gpu_memory_gib", 1024.0),
    "watts": ("gpu_watts", 1.0),
}
AGENT, LAUNCHER = "agent", "launcher"
MAX_NODES = 512


@dataclass(frozen=True)
class GpuUseRow:
    """A GPU allocated to one attempt; or all GPUs of a node together if only its launcher reports (`gpu` is None)."""

    attempt: int
    node: str
    gpu: int | None
    uuid: str
    since: datetime
    until: datetime | None
    mean: Floats  # one value per column; NaN where nothing was reported
    most: Floats


@dataclass(frozen=True)
class GpuHeat:
    """Rows ordered by attempt, node and GPU. Column i begins at `start + i × width` (Unix seconds)."""

    source: str  # AGENT, LAUNCHER, or "" if there are no samples
    field: str
    start: int
    width: int
    columns: int
    rows: list[GpuUseRow]

    @property
    def mean(self) -> float | None:
        """Return the mean over all rows and times; None if there are no values."""
        values = np.concatenate([row.mean for row in self.rows]) if self.rows else np.zeros(0)
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else None


def fields(source: str) -> tuple[str, ...]:
    """Return the fields that this source reports."""
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
) -> GpuHeat:
    """Read one field from the node agents if they report these GPUs, else from what the launchers logged.

    With `user`, columns that this person may not see are blank.
    """
    attempts = [
        attempt for attempt in Attempt.objects.filter(job=job).order_by("number") if attempt.started_at is not None
    ]
    now = time.time() if now is None else now
    begin, stop = _span(attempts, now)
    start, end = begin if start is None else start, stop if end is None else end
    by_agent = _by_agent(attempts, field, start, end, columns, user)
    if by_agent.rows or field not in _BY_LAUNCHER:
        return by_agent
    return _by_launcher(attempts, field, start, end, columns)


def _span(attempts: Sequence[Attempt], now: float) -> tuple[int, int]:
    """Return the time from the first start to the last end, in Unix seconds."""
    begin = min((attempt.started_at.timestamp() for attempt in attempts if attempt.started_at), default=now)
    ends = [attempt.ended_at.timestamp() if attempt.ended_at else now for attempt in attempts]
    return int(begin), int(max(ends, default=now)) + 1


def _by_agent(
    attempts: Sequence[Attempt], field: str, start: int, end: int, columns: int, user: User | None
) -> GpuHeat:
    holdings = allocations.allocated_to(attempts)
    gpu_ids = sorted({holding.gpu_id for rows in holdings.values() for holding in rows})
    within = _within(attempts, holdings)
    values = grid(gpu_ids, field, start=start, end=max(end, start + 1), columns=columns, within=within)
    if user is not None:
        values = access_of(user, gpu_ids, start, start + values.width * columns).grid(gpu_ids, values)
    place = {gpu_id: row for row, gpu_id in enumerate(gpu_ids)}
    rows = []
    for attempt in attempts:
        by_gpu: dict[int, list[Holding]] = {}
        for holding in holdings.get(attempt.pk, ()):
            by_gpu.setdefault(holding.gpu_id, []).append(holding)
        rows += [_row(attempt, gpu_holdings, values, place[gpu_id]) for gpu_id, gpu_holdings in by_gpu.items()]
    has_values = any(np.isfinite(row.mean).any() for row in rows)
    return GpuHeat(
        AGENT if has_values else "", field, values.start, values.width, values.mean.shape[1], rows if has_values else []
    )


def _row(attempt: Attempt, holdings: Sequence[Holding], found: Grid, place: int) -> GpuUseRow:
    """Return one GPU's values while it was allocated to an attempt, possibly with gaps."""
    begins = found.start + found.width * np.arange(found.mean.shape[1])
    is_allocated = np.zeros(len(begins), np.bool_)
    for since, until in _stretches(attempt, holdings):
        is_allocated |= (begins + found.width > since) & (begins < until)
    mean, most = (np.where(is_allocated, part[place], np.nan) for part in (found.mean, found.maximum))
    first, last = holdings[0], holdings[-1]
    over = last.until or attempt.ended_at
    return GpuUseRow(attempt.number, first.agent.node, first.gpu.index, first.gpu.uuid, first.since, over, mean, most)


def _within(attempts: Sequence[Attempt], holdings: Mapping[int, Sequence[Holding]]) -> dict[int, list[Stretch]]:
    """Return when each GPU belonged to the job: what others did with it before and after is excluded."""
    found: dict[int, list[Stretch]] = {}
    for attempt in attempts:
        for holding in holdings.get(attempt.pk, ()):
            found.setdefault(holding.gpu_id, []).extend(_stretches(attempt, [holding]))
    return found


def _stretches(attempt: Attempt, holdings: Iterable[Holding]) -> Iterator[Stretch]:
    """Yield the start and end of each allocation, limited to the attempt's run time."""
    began = attempt.started_at.timestamp() if attempt.started_at else 0.0
    for holding in holdings:
        ends = [moment.timestamp() for moment in (holding.until, attempt.ended_at) if moment is not None]
        yield max(holding.since.timestamp(), began), min(ends, default=np.inf)


def _by_launcher(attempts: Sequence[Attempt], field: str, start: int, end: int, columns: int) -> GpuHeat:
    name, factor = _BY_LAUNCHER[field]
    width = max(1, -(-(end - start) // columns))
    count = max(1, -(-(end - start) // width))
    rows = []
    for attempt in attempts:
        launchers = Stream.objects.filter(attempt=attempt, rank__lt=0).order_by("-rank")
        for rank, node in launchers.values_list("rank", "node").distinct()[:MAX_NODES]:
            read = curve([owner_of(attempt.pk)], name, rank=rank, points=columns * 4)
            values = read.value if read.value is not None else read.mean
            if values is None or not len(values):
                continue
            mean = _binned(read.time, values * factor, start, width, count)
            since = attempt.started_at or attempt.created_at
            if np.isfinite(mean).any():
                rows.append(GpuUseRow(attempt.number, node, None, "", since, attempt.ended_at, mean, mean))
    return GpuHeat(LAUNCHER if rows else "", field, start, width, count, rows)


def _binned(at: Floats, value: Floats, start: int, width: int, count: int) -> Floats:
    column = ((at - start) // width).astype(np.int64)
    inside = (column >= 0) & (column < count) & np.isfinite(value)
    total = np.bincount(column[inside], value[inside], count)
    with np.errstate(invalid="ignore"):
        mean: Floats = total / np.bincount(column[inside], minlength=count)
    return mean
