"""List which jobs a node's GPUs were allocated to, and when, as one person may see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from jobs.allocations import overlaps
from jobs.models import Attempt, Job
from nodes.models import Agent, Holding
from portal.access import sees_all
from portal.models import User

MAX_INTERVALS = 1_000  # the newest
NEWEST_ATTEMPTS = 2_000  # newest attempts searched for jobs without GPUs, which no index finds by node


@dataclass(frozen=True)
class AllocationSpan:
    """A GPU allocated to a job for some time.

    `scheduler_id` and names are empty if the user may not see whose it is.
    """

    gpu_id: int | None  # None: a job without GPUs
    scheduler_id: str
    name: str
    user: str
    job: Job | None  # Vigil's job, if the person may see it
    is_mine: bool
    since: datetime
    until: datetime | None

    @property
    def is_visible(self) -> bool:
        return bool(self.scheduler_id)


def allocation_spans(user: User, agent: Agent, start: datetime, end: datetime) -> list[AllocationSpan]:
    """Return the allocations of this node's GPUs between two moments, newest first."""
    rows = list(
        Holding.objects.between(start, end).filter(agent=agent).order_by("-since", "gpu__index")[:MAX_INTERVALS]
    )
    attempts = _attempts(user, {row.scheduler_id for row in rows})
    return [_span(user, row, _attempt_of(row, attempts.get(row.scheduler_id, ()))) for row in rows]


def jobs_without_gpus(
    user: User, node: str, start: datetime, end: datetime, excluded_ids: Iterable[str]
) -> list[AllocationSpan]:
    """Return Vigil's jobs that ran on a node then, except those in `excluded_ids`, among the newest attempts."""
    newest = Attempt.objects.order_by("-pk").exclude(started_at=None).values_list("pk", "nodes")[:NEWEST_ATTEMPTS]
    there = [pk for pk, nodes in newest if node in nodes]
    rows = Attempt.objects.filter(pk__in=there, started_at__lt=end, job__in=Job.objects.visible_to(user))
    rows = rows.with_job().select_related("job__owner", "job__project").exclude(scheduler_id__in=set(excluded_ids))
    return [
        _attempt_span(user, None, attempt, attempt.started_at, attempt.ended_at)
        for attempt in rows.order_by("-started_at")
        if attempt.started_at and (attempt.ended_at is None or attempt.ended_at > start)
    ]


def _attempts(user: User, scheduler_ids: set[str]) -> dict[str, list[Attempt]]:
    """Return attempts of visible jobs by the scheduler's id, which the scheduler may use again."""
    found: dict[str, list[Attempt]] = {}
    rows = Attempt.objects.filter(scheduler_id__in=scheduler_ids - {""}, job__in=Job.objects.visible_to(user))
    for attempt in rows.with_job().select_related("job__owner", "job__project").order_by("pk"):
        found.setdefault(attempt.scheduler_id, []).append(attempt)
    return found


def _attempt_of(holding: Holding, attempts: Iterable[Attempt]) -> Attempt | None:
    """Return the attempt that this allocation belonged to."""
    return next((attempt for attempt in attempts if overlaps(holding, attempt)), None)


def _span(user: User, row: Holding, attempt: Attempt | None) -> AllocationSpan:
    if attempt is not None:
        return _attempt_span(user, row.gpu_id, attempt, row.since, row.until)
    belongs_to_user = bool(row.user) and row.user == user.slurm_user
    if not belongs_to_user and not sees_all(user):
        return AllocationSpan(row.gpu_id, "", "", "", None, False, row.since, row.until)
    name = row.name or f"job {row.scheduler_id}"
    return AllocationSpan(row.gpu_id, row.scheduler_id, name, row.user, None, belongs_to_user, row.since, row.until)


def _attempt_span(
    user: User, gpu_id: int | None, attempt: Attempt, since: datetime, until: datetime | None
) -> AllocationSpan:
    job = attempt.job
    belongs_to_user = job.owner_id == user.pk
    return AllocationSpan(
        gpu_id, attempt.scheduler_id, job.name, job.owner.username, job, belongs_to_user, since, until
    )
