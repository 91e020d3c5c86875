"""Account for allocated GPUs: sum their use by job and day as samples are merged, and find idle ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import numpy as np
from django.db.models import Exists, F, OuterRef, Prefetch
from django.utils import timezone

from nodes.models import Agent, Gpu, GpuUse, Holding
from nodes.telemetry.fields import gpu_owner
from portal.series.codec import Points
from portal.series.store import Owner

IDLE_AFTER = timedelta(minutes=15)
DAY_S = 86_400
BUSY_PERCENT = 1
MAX_PERIOD_S = 60


@dataclass
class _UseTotal:
    """GPU-seconds of one job and day."""

    user: str
    is_made_up: bool
    allocated: float = 0.0
    used: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True)
class IdleGpu:
    """A GPU that a job has allocated and that has been idle since then."""

    holding: Holding
    since: datetime
    has_process: bool


def add_up(columns: Sequence[tuple[Owner, str, Points]]) -> None:
    """Add a window's utilisation to the jobs that had the GPUs; part of the caller's transaction, once per window."""
    percents = {owner: points for owner, name, points in columns if name == "gpu_percent"}
    if not percents:
        return
    first = min(int(points.step[0]) for points in percents.values())
    last = max(int(points.step[-1]) for points in percents.values())
    allocations = Holding.objects.between(_moment(first), _moment(last + 1))
    sums: dict[tuple[date, str], _UseTotal] = {}
    for holding in allocations.filter(gpu__in=[number for _, number in percents]):
        _add(sums, holding, percents[gpu_owner(holding.gpu_id)])
    for (day, scheduler_id), total in sums.items():
        row, _ = GpuUse.objects.get_or_create(
            day=day, scheduler_id=scheduler_id, defaults={"user": total.user, "is_made_up": total.is_made_up}
        )
        GpuUse.objects.filter(pk=row.pk).update(
            held_s=F("held_s") + total.allocated,
            used_s=F("used_s") + total.used,
            idle_s=F("idle_s") + total.idle,
            is_added=False,
        )


def _add(sums: dict[tuple[date, str], _UseTotal], holding: Holding, points: Points) -> None:
    until = holding.until.timestamp() if holding.until else np.inf
    period = _period(points)
    of_holding = points.take((points.step >= holding.since.timestamp()) & (points.step < until))
    for day in np.unique(of_holding.step // DAY_S).tolist():
        of_day = of_holding.value[of_holding.step // DAY_S == day].clip(0, 100)  # machines' values are untrusted
        key = (_moment(day * DAY_S).date(), holding.scheduler_id)
        total = sums.setdefault(key, _UseTotal(holding.user, holding.is_made_up))
        total.allocated += len(of_day) * period
        total.used += float(of_day.sum()) / 100 * period
        total.idle += int((of_day < BUSY_PERCENT).sum()) * period


def _period(points: Points) -> int:
    """Return the seconds per sample: one for an agent, ten for a dcgm-exporter."""
    return min(MAX_PERIOD_S, int(np.diff(points.step).min())) if len(points) > 1 else 1


def idle_now(now: datetime | None = None) -> list[IdleGpu]:
    """Return GPUs that are allocated and have been idle for `IDLE_AFTER`, process or not; the longest first.

    Silent machines and GPUs without utilisation (MIG slices) are left out.
    """
    now = now or timezone.now()
    allocations = Holding.objects.filter(until=None, since__lte=now - IDLE_AFTER)
    by_agent: dict[int, list[Holding]] = defaultdict(list)
    for holding in allocations.select_related("gpu").defer("gpu__facts", "gpu__counters"):
        by_agent[holding.agent_id].append(holding)
    found: list[IdleGpu] = []
    for agent in Agent.objects.filter(pk__in=by_agent).defer("facts"):
        if not agent.is_silent(now):
            found += _idle_of(agent, by_agent[agent.pk], now)
    return sorted(found, key=lambda gpu: gpu.since)


def _idle_of(agent: Agent, allocations: Sequence[Holding], now: datetime) -> Iterator[IdleGpu]:
    newest = agent.newest.get("gpus", {})
    with_process = {process["gpu"] for process in agent.processes}
    for holding in allocations:
        values = newest.get(holding.gpu.uuid, {})
        if "gpu_percent" not in values or "quiet_since" not in values:
            continue
        since = max(holding.since, _moment(values["quiet_since"]))
        if now - since >= IDLE_AFTER:
            holding.agent = agent
            yield IdleGpu(holding, since, holding.gpu.uuid in with_process)


def processes_on_free_gpus(now: datetime | None = None) -> list[tuple[Gpu, dict[str, object]]]:
    """Return processes on GPUs that are not allocated, as agents last reported them."""
    now = now or timezone.now()
    allocations = Holding.objects.filter(gpu=OuterRef("pk"), until=None)
    free = Gpu.objects.filter(~Exists(allocations), gone_at=None).defer("facts", "counters")
    found: list[tuple[Gpu, dict[str, object]]] = []
    for agent in Agent.objects.defer("facts", "newest").prefetch_related(Prefetch("gpus", free)):
        if agent.processes and not agent.is_silent(now):
            gpus = {gpu.uuid: gpu for gpu in agent.gpus.all()}
            found += [(gpus[process["gpu"]], process) for process in agent.processes if process["gpu"] in gpus]
    return found


def _moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)
