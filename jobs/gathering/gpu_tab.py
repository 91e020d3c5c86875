"""Read what accompanies a job's GPU map: whether there is one, the ranks of its rows, the loss, the low-use finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from django.core.cache import cache

from jobs.allocations import GPUS_EVENT
from jobs.gathering import charts, gpus
from jobs.gathering.job_life import JobLife
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Event
from jobs.presenting.job_page.gpus import LOW_USE_HOURS, GpuFinding, finding
from jobs.presenting.size import is_elastic, ranks_and_nodes
from nodes.models import Holding
from portal.models import Series
from portal.series import read
from portal.series.codec import Floats
from vigil_core import untrusted

HOUR_S = 3600
MIN_COVERAGE = 0.8  # minutes of an hour; with fewer nothing is concluded
CACHE_S = 60
LOSS_POINTS = 600


def has_any(life: JobLife) -> bool:
    """Return whether the job has or had GPUs, according to its request, allocations, or launchers."""
    ran = [attempt for attempt in life.attempts if attempt.started_at]
    if not ran:
        return False
    if ranks_and_nodes(life.job.spec)[2]:
        return True
    ids = [attempt.scheduler_id for attempt in ran if attempt.scheduler_id]
    if Holding.objects.filter(scheduler_id__in=ids).exists():
        return True
    owners = [owner_of(attempt.pk)[1] for attempt in ran]
    return Series.objects.filter(owner_kind="attempt", owner_id__in=owners, name="gpu_percent").exists()


def ranks_of(life: JobLife) -> dict[str, int]:
    """Return the rank of each GPU by UUID, from the newest attempt's launchers; empty if ranks may move."""
    if is_elastic(life.job.spec):
        return {}
    events = Event.objects.filter(attempt=life.latest, kind=GPUS_EVENT, rank__lt=0).order_by("id")
    uuids_by_node = {-(rank or 0) - 1: _gpu_uuids(data) for rank, data in events.values_list("rank", "data")}
    sizes = {len(uuids) for uuids in uuids_by_node.values()}
    if len(sizes) != 1:
        return {}
    (size,) = sizes
    return {
        uuid: node * size + place for node, uuids in uuids_by_node.items() for place, uuid in enumerate(uuids) if uuid
    }


def _gpu_uuids(data: dict[str, Any]) -> list[str]:
    found = data.get("gpus")
    gpus = [gpu for gpu in found[:64] if isinstance(gpu, dict)] if isinstance(found, list) else []
    return [untrusted.name(gpu.get("uuid"), 96) for gpu in gpus]


def loss_between(life: JobLife, start: int | None, end: int | None) -> dict[str, Any] | None:
    """Return the loss of the steps done between two moments, or of all; None if there is none."""
    owners = charts.owners(life)
    losses = read.curve(owners, "loss", points=LOSS_POINTS)
    if start is not None and end is not None and len(losses.step):
        inside = np.flatnonzero((losses.time >= start) & (losses.time < end))
        if not len(inside):
            return None
        first, last = int(losses.step[inside[0]]), int(losses.step[inside[-1]])
        losses = read.curve(owners, "loss", start=first, end=last, points=LOSS_POINTS)
    if not len(losses.step):
        return None
    values = losses.value if losses.value is not None else losses.mean
    assert values is not None
    return {"step": losses.step.tolist(), "time": _short(losses.time, 3), "value": _short(values, 5)}


def _short(values: Floats, digits: int) -> list[float | None]:
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]


def low_use(life: JobLife) -> GpuFinding | None:
    """Return a finding if the GPUs were little used in the last hour of the newest attempt that ran for an hour."""
    long_attempts = [attempt for attempt in life.attempts if _ran_s(life, attempt) >= LOW_USE_HOURS * HOUR_S]
    if not long_attempts:
        return None
    attempt = long_attempts[-1]
    key = f"gpus.low.{attempt.key}.{attempt.is_alive}"
    use: Sequence[Any] | None = cache.get(key)
    if use is None:  # takes some hundred milliseconds for many nodes, and pages poll every few seconds
        use = _last_hour(life, attempt)
        cache.set(key, use, CACHE_S)
    return finding(*use)


def _ran_s(life: JobLife, attempt: Attempt) -> float:
    return ((attempt.ended_at or life.now) - attempt.started_at).total_seconds() if attempt.started_at else 0.0


def _last_hour(life: JobLife, attempt: Attempt) -> tuple[float | None, int]:
    """Return the mean utilisation, None if too little is known, and the number of GPUs, 0 if unknown."""
    end = int((attempt.ended_at or life.now).timestamp())
    found = gpus.heat(life.job, "gpu_percent", start=end - LOW_USE_HOURS * HOUR_S, end=end, columns=60)
    rows = [row for row in found.rows if row.attempt == attempt.number and np.isfinite(row.mean).any()]
    if not rows or np.mean([np.isfinite(row.mean).mean() for row in rows]) < MIN_COVERAGE:
        return None, 0
    mean = float(np.mean([np.nanmean(row.mean) for row in rows]))
    return mean, len({row.uuid for row in rows if row.uuid})
