"""What goes with a job's map of GPUs: whether there is one, the ranks of its rows, the loss beside it, the finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from django.core.cache import cache

from jobs.allocations import TOLD
from jobs.gathering import charts, gpus
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Event
from jobs.presenting.gpus import LOW_USE_HOURS, Finding, finding
from jobs.presenting.header import Life
from jobs.presenting.size import is_elastic, ranks_and_nodes
from nodes.models import Holding
from portal.models import Series
from portal.series import read
from portal.series.codec import Floats
from vigil_core import untrusted

HOUR_S = 3600
KNOWN = 0.8  # of an hour's minutes, else nothing is concluded
KEPT_S = 60
LOSS_POINTS = 600


def has_any(life: Life) -> bool:
    """Whether it holds or held GPUs, as far as anybody tells: its request, who holds what, or its launchers."""
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


def ranks_of(life: Life) -> dict[str, int]:
    """Who had each GPU, by its UUID, as launchers told of the newest attempt; nothing where ranks may change."""
    if is_elastic(life.job.spec):
        return {}
    events = Event.objects.filter(attempt=life.latest, kind=TOLD, rank__lt=0).order_by("id")
    told = {-(rank or 0) - 1: _uuids(data) for rank, data in events.values_list("rank", "data")}
    sizes = {len(uuids) for uuids in told.values()}
    if len(sizes) != 1:
        return {}
    (size,) = sizes
    return {uuid: node * size + place for node, uuids in told.items() for place, uuid in enumerate(uuids) if uuid}


def _uuids(data: dict[str, Any]) -> list[str]:
    found = data.get("gpus")
    there = [one for one in found[:64] if isinstance(one, dict)] if isinstance(found, list) else []
    return [untrusted.name(one.get("uuid"), 96) for one in there]


def loss_between(life: Life, start: int | None, end: int | None) -> dict[str, Any] | None:
    """The loss of the steps that were done between two moments, or of all; None where there is none."""
    owners = charts.owners(life)
    found = read.curve(owners, "loss", points=LOSS_POINTS)
    if start is not None and end is not None and len(found.step):
        inside = np.flatnonzero((found.time >= start) & (found.time < end))
        if not len(inside):
            return None
        first, last = int(found.step[inside[0]]), int(found.step[inside[-1]])
        found = read.curve(owners, "loss", start=first, end=last, points=LOSS_POINTS)
    if not len(found.step):
        return None
    values = found.value if found.value is not None else found.mean
    assert values is not None
    return {"step": found.step.tolist(), "time": _short(found.time, 3), "value": _short(values, 5)}


def _short(values: Floats, digits: int) -> list[float | None]:
    return [round(value, digits) if np.isfinite(value) else None for value in values.tolist()]


def low_use(life: Life) -> Finding | None:
    """That its GPUs did little in the last hour of the newest attempt that ran for so long, whatever kind of job."""
    long = [one for one in life.attempts if _ran_s(life, one) >= LOW_USE_HOURS * HOUR_S]
    if not long:
        return None
    attempt = long[-1]
    key = f"gpus.low.{attempt.key}.{attempt.is_alive}"
    told: Sequence[Any] | None = cache.get(key)
    if told is None:  # of many nodes it costs some hundred milliseconds, and pages ask every few seconds
        told = _last_hour(life, attempt)
        cache.set(key, told, KEPT_S)
    return finding(*told)


def _ran_s(life: Life, attempt: Attempt) -> float:
    return ((attempt.ended_at or life.now) - attempt.started_at).total_seconds() if attempt.started_at else 0.0


def _last_hour(life: Life, attempt: Attempt) -> tuple[float | None, int]:
    """The mean utilisation, None where too little of it is known; and of how many GPUs, 0 where nobody counts them."""
    end = int((attempt.ended_at or life.now).timestamp())
    found = gpus.heat(life.job, "gpu_percent", start=end - LOW_USE_HOURS * HOUR_S, end=end, columns=60)
    rows = [row for row in found.rows if row.attempt == attempt.number and np.isfinite(row.mean).any()]
    if not rows or np.mean([np.isfinite(row.mean).mean() for row in rows]) < KNOWN:
        return None, 0
    mean = float(np.mean([np.nanmean(row.mean) for row in rows]))
    return mean, len({row.uuid for row in rows if row.uuid})
