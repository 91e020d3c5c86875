"""Whose jobs a machine's GPUs were in, from when until when, as one person may see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from jobs.allocations import is_of
from jobs.listing.sight import sees_all
from jobs.models import Attempt, Job
from nodes.models import Agent, Holding
from portal.models import User

MOST = 1_000  # stretches, the newest
NEWEST_ATTEMPTS = 2_000  # that are looked through for jobs without GPUs: no index leads from a node to them


@dataclass(frozen=True)
class Stretch:
    """A GPU in the hands of a job. Without `scheduler_id` and names it is somebody else's, and not to be told."""

    gpu_id: int | None  # None: the job was here without one
    scheduler_id: str
    name: str
    user: str
    job: Job | None  # Vigil's, where it is one that the person may see
    is_mine: bool
    since: datetime
    until: datetime | None

    @property
    def is_told(self) -> bool:
        return bool(self.scheduler_id)


def stretches(user: User, agent: Agent, start: datetime, end: datetime) -> list[Stretch]:
    """Who held this machine's GPUs between two moments, the newest first."""
    rows = list(Holding.objects.between(start, end).filter(agent=agent).order_by("-since", "gpu__index")[:MOST])
    known = _attempts(user, {row.scheduler_id for row in rows})
    return [_stretch(user, row, _of(row, known.get(row.scheduler_id, ()))) for row in rows]


def without_gpus(user: User, node: str, start: datetime, end: datetime, told: Iterable[str]) -> list[Stretch]:
    """Jobs of Vigil's that ran on a node then, besides those whose ids are `told`; of the newest that there are."""
    newest = Attempt.objects.order_by("-pk").exclude(started_at=None).values_list("pk", "nodes")[:NEWEST_ATTEMPTS]
    there = [pk for pk, nodes in newest if node in nodes]
    rows = Attempt.objects.filter(pk__in=there, started_at__lt=end, job__in=Job.objects.visible_to(user))
    rows = rows.with_job().select_related("job__owner", "job__project").exclude(scheduler_id__in=set(told))
    return [
        _named(user, None, attempt, attempt.started_at, attempt.ended_at)
        for attempt in rows.order_by("-started_at")
        if attempt.started_at and (attempt.ended_at is None or attempt.ended_at > start)
    ]


def _attempts(user: User, scheduler_ids: set[str]) -> dict[str, list[Attempt]]:
    """Attempts by the scheduler's id, of jobs that the person may see. The scheduler may use a number again."""
    found: dict[str, list[Attempt]] = {}
    rows = Attempt.objects.filter(scheduler_id__in=scheduler_ids - {""}, job__in=Job.objects.visible_to(user))
    for attempt in rows.with_job().select_related("job__owner", "job__project").order_by("pk"):
        found.setdefault(attempt.scheduler_id, []).append(attempt)
    return found


def _of(holding: Holding, attempts: Iterable[Attempt]) -> Attempt | None:
    """The attempt that held it then."""
    return next((attempt for attempt in attempts if is_of(holding, attempt)), None)


def _stretch(user: User, row: Holding, attempt: Attempt | None) -> Stretch:
    if attempt is not None:
        return _named(user, row.gpu_id, attempt, row.since, row.until)
    own = bool(row.user) and row.user == user.slurm_user
    if not own and not sees_all(user):
        return Stretch(row.gpu_id, "", "", "", None, False, row.since, row.until)
    name = row.name or f"job {row.scheduler_id}"
    return Stretch(row.gpu_id, row.scheduler_id, name, row.user, None, own, row.since, row.until)


def _named(user: User, gpu_id: int | None, attempt: Attempt, since: datetime, until: datetime | None) -> Stretch:
    job = attempt.job
    mine = job.owner_id == user.pk
    return Stretch(gpu_id, attempt.scheduler_id, job.name, job.owner.username, job, mine, since, until)
