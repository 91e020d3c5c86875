"""Attribute GPU-hours: each job's daily use gets its job, project and person, and is aggregated by day.

`nodes.telemetry.use` counts by the scheduler's ids as samples are merged, without knowing whose they are. Rows that it
changes are marked, and found here by that mark, including late samples of past days.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any

from django.db.models import Case, F, Max, Min, Q, Sum, Value, When
from django.utils import timezone

from jobs import lease
from jobs.lease import ActiveLease
from jobs.models import Attempt, GpuHours, JobHours
from nodes.models import GpuUse, Holding
from portal.bulk import chunks
from portal.models import User

BUDGET_S = 10.0
ROWS = 500  # per query and transaction, because reports wait for it on SQLite
SLACK = timedelta(days=1)  # a machine's clock and the scheduler's may differ at midnight
RECENT_WINDOW = timedelta(minutes=10)


@dataclass(frozen=True)
class _Owner:
    job: int | None
    project: int | None
    person: int | None


def update_sums(budget_s: float = BUDGET_S) -> int:
    """Bring the sums up to date, for about `budget_s` seconds; return how many days were updated.

    A lease keeps other processes out: if two read and wrote sums at once, the slower one would write older values.
    """
    if not GpuUse.objects.filter(is_added=False).exists():
        return 0
    lock = lease.take("waste")
    if lock is None:
        return 0
    try:
        return _update_sums(lock, time.monotonic() + budget_s)
    finally:
        lock.release()


def end_allocations_with_jobs(now: datetime | None = None) -> int:
    """End allocations at the end of their jobs, known from Slurm's accounting, rather than at the next queue poll.

    Returns how many were changed.
    """
    now = now or timezone.now()
    closed = Holding.objects.filter(until__gt=now - RECENT_WINDOW, until__lte=now)
    rows = list(closed.values_list("pk", "scheduler_id", "since", "until"))
    ends = dict(_attempts_of({row[1] for row in rows}).exclude(ended_at=None).values_list("scheduler_id", "ended_at"))
    early = [
        (pk, ends[scheduler_id])
        for pk, scheduler_id, since, until in rows
        if scheduler_id in ends and since < ends[scheduler_id] < until
    ]
    for pk, end in early:
        Holding.objects.filter(pk=pk, until__gt=end).update(until=end)
    return len(early)


def _update_sums(lock: ActiveLease, deadline: float) -> int:
    days = list(GpuUse.objects.filter(is_added=False).order_by("-day").values_list("day", flat=True).distinct())
    for done, day in enumerate(days, 1):
        _update_day(lock, day)
        if time.monotonic() > deadline:
            return done
    return len(days)


def _update_day(lock: ActiveLease, day: date) -> None:
    waiting = GpuUse.objects.filter(day=day, is_added=False).order_by("pk")
    rows = list(waiting.only("scheduler_id", "user", "job", "project", "person"))
    for chunk in chunks(rows, ROWS):
        owners = _owners(day, chunk)
        with lock.writing():
            _assign_owners(chunk, owners)
            _sum_jobs(chunk, owners)
    with lock.writing():
        # Rows counted since the check are marked again, and are in these sums or the next.
        waiting.filter(pk__lte=rows[-1].pk).update(is_added=True)
        GpuHours.objects.filter(day=day).delete()
        GpuHours.objects.bulk_create(_sums(day), batch_size=ROWS)


def _assign_owners(rows: Sequence[GpuUse], owners: dict[int, _Owner]) -> None:
    """Store the owners of these rows where they differ."""
    for row in rows:
        owner = owners[row.pk]
        if owner != _Owner(row.job, row.project_id, row.person_id):
            fields = {"job": owner.job, "project": owner.project, "person": owner.person}
            GpuUse.objects.filter(pk=row.pk).update(**fields)


def _sum_jobs(rows: Sequence[GpuUse], owners: dict[int, _Owner]) -> None:
    """Sum up each job's days: Vigil's jobs over all their attempts, others by the scheduler's id."""
    jobs = {owner.job for owner in owners.values() if owner.job is not None}
    changed = {row.scheduler_id for row in rows}
    attempts = Attempt.objects.filter(job__in=jobs).exclude(scheduler_id="").order_by()
    days = GpuUse.objects.filter(scheduler_id__in=changed | set(attempts.values_list("scheduler_id", flat=True)))
    outside_id = Case(When(job=None, then=F("scheduler_id")), default=Value(""))
    sums = days.order_by().annotate(outside_id=outside_id).values("outside_id", "job").annotate(
        latest_scheduler_id=Max("scheduler_id"), owner_project=Max("project"), owner_person=Max("person"),
        slurm_user=Max("user"), first=Min("day"), last=Max("day"), allocated=Sum("held_s"), used=Sum("used_s"),
        idle=Sum("idle_s"),
    )  # fmt: skip
    made = [
        JobHours(
            scheduler_id=row["latest_scheduler_id"], job=row["job"], project_id=row["owner_project"],
            person_id=row["owner_person"], user=row["slurm_user"], first_day=row["first"], last_day=row["last"],
            held_s=row["allocated"], used_s=row["used"], idle_s=row["idle"],
        )
        for row in sums
        # An id may also belong to another job.
        if row["job"] in jobs or (row["job"] is None and row["outside_id"] in changed)
    ]  # fmt: skip
    JobHours.objects.filter(Q(job__in=jobs) | Q(job=None, scheduler_id__in=changed)).delete()
    JobHours.objects.bulk_create(made)


def _owners(day: date, rows: Sequence[GpuUse]) -> dict[int, _Owner]:
    """Return the owner of each row: the job whose attempt has the scheduler's id, else the person with that Slurm
    user.
    """
    attempts = _attempts_of({row.scheduler_id for row in rows}).exclude(started_at=None).order_by("pk")
    attempt_rows = attempts.values_list(
        "scheduler_id", "started_at", "ended_at", "job", "job__project", "job__owner", named=True
    )
    owners: dict[str, _Owner] = {}
    for row in attempt_rows:
        ended = row.ended_at.date() if row.ended_at else date.max - SLACK
        if row.started_at.date() - SLACK <= day <= ended + SLACK:  # the scheduler may reuse an id
            owners[row.scheduler_id] = _Owner(row.job, row.job__project, row.job__owner)
    people = dict(User.objects.filter(slurm_user__in={row.user for row in rows}).values_list("slurm_user", "pk"))
    return {row.pk: owners.get(row.scheduler_id) or _Owner(None, None, people.get(row.user)) for row in rows}


def _attempts_of(scheduler_ids: Iterable[str]) -> Any:
    return Attempt.objects.confirmed().filter(scheduler_id__in=set(scheduler_ids))


def _sums(day: date) -> list[GpuHours]:
    outside_user = Case(When(Q(person=None), then=F("user")), default=Value(""))
    rows = GpuUse.objects.filter(day=day).order_by().annotate(slurm_user=outside_user)
    sums = rows.values("project", "person", "slurm_user").annotate(
        allocated=Sum("held_s"), used=Sum("used_s"), idle=Sum("idle_s")
    )
    return [
        GpuHours(
            day=day, project_id=row["project"], person_id=row["person"], user=row["slurm_user"],
            held_s=row["allocated"], used_s=row["used"], idle_s=row["idle"],
        )
        for row in sums
    ]  # fmt: skip
