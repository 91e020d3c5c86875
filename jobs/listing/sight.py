"""What of machines' telemetry a person may see: all of it, or nothing of a GPU while somebody else's job holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.conf import settings
from django.db.models import Q

from jobs.models import Attempt, Job
from nodes.models import Holding
from nodes.telemetry.grid import Grid
from portal.models import User
from portal.series.envelope import Outline

Stretch = tuple[float, float]  # Unix seconds


@dataclass(frozen=True)
class Sight:
    """Which stretches of which GPUs are hidden from a person."""

    hidden: dict[int, list[Stretch]] = field(default_factory=dict)

    def hides(self, gpu_id: int | None, at: float) -> bool:
        return any(since <= at < until for since, until in self.hidden.get(gpu_id or 0, ()))

    def outline(self, gpu_id: int, outline: Outline) -> Outline:
        """Leaves out what touches a hidden stretch."""
        kept = np.ones(len(outline.first), np.bool_)
        for since, until in self.hidden.get(gpu_id, ()):
            kept &= (outline.last < since) | (outline.first >= until)
        return Outline(*(getattr(outline, name)[kept] for name in Outline.__dataclass_fields__))

    def grid(self, gpu_ids: Sequence[int], grid: Grid) -> Grid:
        """The same, for what was read of many GPUs."""
        begin = grid.start + grid.width * np.arange(grid.mean.shape[1])
        for row, gpu_id in enumerate(gpu_ids):
            for since, until in self.hidden.get(gpu_id, ()):
                mine = (begin + grid.width > since) & (begin < until)
                grid.mean[row, mine] = grid.most[row, mine] = np.nan
        return grid


def sight(user: User, gpu_ids: Iterable[int], start: float, end: float) -> Sight:
    """What is hidden from this person of these GPUs between two moments."""
    if sees_all(user):
        return Sight()
    held = Holding.objects.between(datetime.fromtimestamp(max(0, start), UTC), datetime.fromtimestamp(end + 1, UTC))
    hidden: dict[int, list[Stretch]] = {}
    for one in held.filter(gpu__in=list(gpu_ids)).exclude(_seen_by(user)):
        until = one.until.timestamp() if one.until else float("inf")
        hidden.setdefault(one.gpu_id, []).append((one.since.timestamp(), until))
    return Sight(hidden)


def visible_holdings(user: User) -> Any:
    """Who held what, as far as this person may know."""
    rows = Holding.objects.all()
    return rows if sees_all(user) else rows.filter(_seen_by(user))


def sees_all(user: User) -> bool:
    return user.is_sysadmin or settings.VIGIL_QUEUE_VISIBLE == "everyone"


def _seen_by(user: User) -> Q:
    own = Q(user=user.slurm_user) if user.slurm_user else Q(pk__in=())
    known = Attempt.objects.exclude(scheduler_id="").filter(job__in=Job.objects.visible_to(user))
    return own | Q(scheduler_id__in=known.values("scheduler_id"))
