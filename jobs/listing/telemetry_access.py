"""Decide which telemetry a person may see: all of it, or none of a GPU while it is allocated to somebody else's job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.db.models import Q

from jobs import allocations
from jobs.models import Attempt, Job
from nodes.models import Agent, Holding, NodeEvent
from nodes.telemetry.events import FROM_KERNEL
from nodes.telemetry.grid import Grid
from portal.access import sees_all
from portal.models import User
from portal.series.envelope import Outline
from vigil_core.untrusted import MAX_UNIX_TIME

Stretch = tuple[float, float]  # Unix seconds
BATCH_S = 10  # maximum age of cached answers


@dataclass(frozen=True)
class TelemetryAccess:
    """The times of GPUs that are hidden from a person."""

    hidden: dict[int, list[Stretch]] = field(default_factory=dict)
    is_whole: bool = True  # whether this person sees everything

    def hides(self, gpu_id: int | None, at: float) -> bool:
        return any(since <= at < until for since, until in self.hidden.get(gpu_id or 0, ()))

    def hides_newest(self, gpu_id: int, now: float, sampled_at: int | None) -> bool:
        """Return whether to hide the newest sample: on a silent node it may be from a time when others used the GPU."""
        reported_at = now if sampled_at is None else sampled_at
        then = any(
            since <= reported_at and reported_at - BATCH_S < until for since, until in self.hidden.get(gpu_id, ())
        )
        return then or self.hides(gpu_id, now)

    def hides_text(self, event: NodeEvent) -> bool:
        """Return whether to hide an event's text: kernel messages name processes of any user.

        One text stands for equal events up to the last one, and the kernel does not always say which GPU it is about.
        """
        if event.kind not in FROM_KERNEL:
            return self.hides(event.gpu_id, event.at.timestamp())
        if event.gpu_id is None:
            return not self.is_whole
        first, last = event.at.timestamp(), event.last_at.timestamp()
        return any(since <= last and first < until for since, until in self.hidden.get(event.gpu_id, ()))

    def outline(self, gpu_id: int, outline: Outline) -> Outline:
        """Return the outline without points that overlap hidden times."""
        is_visible = np.ones(len(outline.first), np.bool_)
        for since, until in self.hidden.get(gpu_id, ()):
            is_visible &= (outline.last < since) | (outline.first >= until)
        return Outline(*(getattr(outline, name)[is_visible] for name in Outline.__dataclass_fields__))

    def grid(self, gpu_ids: Sequence[int], grid: Grid) -> Grid:
        """Blank the hidden times in a grid of many GPUs."""
        begin = grid.start + grid.width * np.arange(grid.mean.shape[1])
        for row, gpu_id in enumerate(gpu_ids):
            for since, until in self.hidden.get(gpu_id, ()):
                is_hidden = (begin + grid.width > since) & (begin < until)
                grid.mean[row, is_hidden] = grid.maximum[row, is_hidden] = np.nan
        return grid


def access_of(user: User, gpu_ids: Iterable[int], start: float, end: float) -> TelemetryAccess:
    """Return what this person may see of these GPUs between two moments."""
    if sees_all(user):
        return TelemetryAccess()
    holdings = Holding.objects.between(_moment(start), _moment(end + 1))
    hidden: dict[int, list[Stretch]] = {}
    for holding in holdings.filter(gpu__in=list(gpu_ids)).exclude(_visible_to(user)):
        until = holding.until.timestamp() if holding.until else float("inf")
        hidden.setdefault(holding.gpu_id, []).append((holding.since.timestamp(), until))
    return TelemetryAccess(hidden, is_whole=False)


def earliest_report(now: float, agents: Iterable[Agent]) -> float:
    """Return the earliest time that these nodes' newest reports may be from."""
    return min([now, *(agent.sampled_at for agent in agents if agent.sampled_at is not None)]) - BATCH_S


def hidden_now(user: User) -> set[str]:
    """Return the UUIDs of GPUs that this person may not see at present."""
    if sees_all(user):
        return set()
    return set(Holding.objects.filter(until=None).exclude(_visible_to(user)).values_list("gpu__uuid", flat=True))


def _moment(second: float) -> datetime:
    return datetime.fromtimestamp(min(max(0, second), MAX_UNIX_TIME), UTC)


def visible_holdings(user: User) -> Any:
    """Return the allocations that this person may see."""
    rows = Holding.objects.all()
    return rows if sees_all(user) else rows.filter(_visible_to(user))


def _visible_to(user: User) -> Q:
    by_user = Q(user=user.slurm_user) if user.slurm_user else Q(pk__in=())
    attempts = Attempt.objects.confirmed().filter(job__in=Job.objects.visible_to(user))
    return by_user | Q(allocations.overlaps_any(attempts))
