"""What held GPUs did: added up by job and day as samples are merged, and which of them do nothing just now."""

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
MOST_PERIOD_S = 60


@dataclass
class _Sum:
    """GPU-seconds of one job and day."""

    user: str
    is_made_up: bool
    held: float = 0.0
    used: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True)
class Idle:
    """A GPU that a job holds, and that has done nothing since then."""

    holding: Holding
    since: datetime
    has_process: bool


def add_up(columns: Sequence[tuple[Owner, str, Points]]) -> None:
    """Count a window's utilisation for whoever held the GPUs; part of the caller's transaction, once a window."""
    percents = {owner: points for owner, name, points in columns if name == "gpu_percent"}
    if not percents:
        return
    first = min(int(points.step[0]) for points in percents.values())
    last = max(int(points.step[-1]) for points in percents.values())
    held = Holding.objects.between(_moment(first), _moment(last + 1))
    sums: dict[tuple[date, str], _Sum] = {}
    for holding in held.filter(gpu__in=[number for _, number in percents]):
        _add(sums, holding, percents[gpu_owner(holding.gpu_id)])
    for (day, scheduler_id), total in sums.items():
        row, _ = GpuUse.objects.get_or_create(
            day=day, scheduler_id=scheduler_id, defaults={"user": total.user, "is_made_up": total.is_made_up}
        )
        GpuUse.objects.filter(pk=row.pk).update(
            held_s=F("held_s") + total.held,
            used_s=F("used_s") + total.used,
            idle_s=F("idle_s") + total.idle,
            is_added=False,
        )


def _add(sums: dict[tuple[date, str], _Sum], holding: Holding, points: Points) -> None:
    until = holding.until.timestamp() if holding.until else np.inf
    period = _period(points)
    mine = points.take((points.step >= holding.since.timestamp()) & (points.step < until))
    for day in np.unique(mine.step // DAY_S).tolist():
        of_day = mine.value[mine.step // DAY_S == day].clip(0, 100)  # a machine may tell anything
        key = (_moment(day * DAY_S).date(), holding.scheduler_id)
        total = sums.setdefault(key, _Sum(holding.user, holding.is_made_up))
        total.held += len(of_day) * period
        total.used += float(of_day.sum()) / 100 * period
        total.idle += int((of_day < BUSY_PERCENT).sum()) * period


def _period(points: Points) -> int:
    """Seconds that each sample stands for: an agent tells one each, a dcgm-exporter one in ten."""
    return min(MOST_PERIOD_S, int(np.diff(points.step).min())) if len(points) > 1 else 1


def idle_now(now: datetime | None = None) -> list[Idle]:
    """GPUs that are held and have done nothing for `IDLE_AFTER`, with or without a process; the longest first.

    Nothing is said of a machine that is silent, or of a GPU whose utilisation nobody tells (a slice by MIG).
    """
    now = now or timezone.now()
    open_ones = Holding.objects.filter(until=None, since__lte=now - IDLE_AFTER)
    by_agent: dict[int, list[Holding]] = defaultdict(list)
    for holding in open_ones.select_related("gpu").defer("gpu__facts", "gpu__counters"):
        by_agent[holding.agent_id].append(holding)
    found: list[Idle] = []
    for agent in Agent.objects.filter(pk__in=by_agent).defer("facts"):
        if not agent.is_silent(now):
            found += _idle_of(agent, by_agent[agent.pk], now)
    return sorted(found, key=lambda one: one.since)


def _idle_of(agent: Agent, held: Sequence[Holding], now: datetime) -> Iterator[Idle]:
    newest = agent.newest.get("gpus", {})
    with_process = {process["gpu"] for process in agent.processes}
    for holding in held:
        told = newest.get(holding.gpu.uuid, {})
        if "gpu_percent" not in told or "quiet_since" not in told:
            continue
        since = max(holding.since, _moment(told["quiet_since"]))
        if now - since >= IDLE_AFTER:
            holding.agent = agent
            yield Idle(holding, since, holding.gpu.uuid in with_process)


def unheld(now: datetime | None = None) -> list[tuple[Gpu, dict[str, object]]]:
    """Processes on GPUs that nobody holds, as agents told them last."""
    now = now or timezone.now()
    held = Holding.objects.filter(gpu=OuterRef("pk"), until=None)
    free = Gpu.objects.filter(~Exists(held), gone_at=None).defer("facts", "counters")
    found: list[tuple[Gpu, dict[str, object]]] = []
    for agent in Agent.objects.defer("facts", "newest").prefetch_related(Prefetch("gpus", free)):
        if agent.processes and not agent.is_silent(now):
            gpus = {gpu.uuid: gpu for gpu in agent.gpus.all()}
            found += [(gpus[one["gpu"]], one) for one in agent.processes if one["gpu"] in gpus]
    return found


def _moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)
