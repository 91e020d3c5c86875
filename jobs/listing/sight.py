"""What of machines' telemetry a person may see: all of it, or nothing of a GPU while somebody else's job holds it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
from django.conf import settings
from django.db.models import Q

from jobs import allocations
from jobs.models import Attempt, Job
from nodes.models import Agent, Holding, NodeEvent
from nodes.telemetry.events import FROM_KERNEL
from nodes.telemetry.grid import Grid
from portal.models import User
from portal.series.envelope import Outline
from vigil_core.untrusted import END_OF_TIME

Stretch = tuple[float, float]  # Unix seconds
BATCH_S = 10  # that what is told at once may be old


@dataclass(frozen=True)
class Sight:
    """Which stretches of which GPUs are hidden from a person."""

    hidden: dict[int, list[Stretch]] = field(default_factory=dict)
    is_whole: bool = True  # whether this person sees everything

    def hides(self, gpu_id: int | None, at: float) -> bool:
        return any(since <= at < until for since, until in self.hidden.get(gpu_id or 0, ()))

    def hides_newest(self, gpu_id: int, now: float, sampled_at: int | None) -> bool:
        """Whether what was told last is to be left out: of a silent machine that is of a time when others held it."""
        told = now if sampled_at is None else sampled_at
        then = any(since <= told and told - BATCH_S < until for since, until in self.hidden.get(gpu_id, ()))
        return then or self.hides(gpu_id, now)

    def hides_words(self, event: NodeEvent) -> bool:
        """Whether an event's words are to be left out: the kernel's text names processes, whosever they are.

        One text stands for equal ones until the last; and of which GPU it is, the kernel does not always tell.
        """
        if event.kind not in FROM_KERNEL:
            return self.hides(event.gpu_id, event.at.timestamp())
        if event.gpu_id is None:
            return not self.is_whole
        first, last = event.at.timestamp(), event.last_at.timestamp()
        return any(since <= last and first < until for since, until in self.hidden.get(event.gpu_id, ()))

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
                grid.mean[row, mine] = grid.maximum[row, mine] = np.nan
        return grid


def sight(user: User, gpu_ids: Iterable[int], start: float, end: float) -> Sight:
    """What is hidden from this person of these GPUs between two moments."""
    if sees_all(user):
        return Sight()
    held = Holding.objects.between(_moment(start), _moment(end + 1))
    hidden: dict[int, list[Stretch]] = {}
    for one in held.filter(gpu__in=list(gpu_ids)).exclude(_seen_by(user)):
        until = one.until.timestamp() if one.until else float("inf")
        hidden.setdefault(one.gpu_id, []).append((one.since.timestamp(), until))
    return Sight(hidden, is_whole=False)


def earliest(now: float, agents: Iterable[Agent]) -> float:
    """Since when what these machines told last may be."""
    return min([now, *(agent.sampled_at for agent in agents if agent.sampled_at is not None)]) - BATCH_S


def hidden_now(user: User) -> set[str]:
    """The GPUs, by UUID, of which this person may know nothing just now."""
    if sees_all(user):
        return set()
    return set(Holding.objects.filter(until=None).exclude(_seen_by(user)).values_list("gpu__uuid", flat=True))


def _moment(second: float) -> datetime:
    return datetime.fromtimestamp(min(max(0, second), END_OF_TIME), UTC)


def visible_holdings(user: User) -> Any:
    """Who held what, as far as this person may know."""
    rows = Holding.objects.all()
    return rows if sees_all(user) else rows.filter(_seen_by(user))


def sees_all(user: User) -> bool:
    return user.is_sysadmin or settings.VIGIL_QUEUE_VISIBLE == "everyone"


def _seen_by(user: User) -> Q:
    own = Q(user=user.slurm_user) if user.slurm_user else Q(pk__in=())
    known = Attempt.objects.confirmed().filter(job__in=Job.objects.visible_to(user))
    return own | Q(allocations.of_any(known))
