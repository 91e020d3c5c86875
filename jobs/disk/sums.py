"""Add up the disk use of each project's jobs: at each request where jobs are few, else in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models import Count, F, Min, Q, Sum
from django.utils import timezone

from jobs.models import Checkpoint, DiskSum, Job
from portal.models import Project

MAX_SUMMED_JOBS = 10_000
"""Up to this many jobs are summed at each request."""
MAX_AGE = timedelta(hours=1)  # sums are renewed even without new measurements, because jobs are deleted
PAUSE_FACTOR = 200  # times the duration of adding up, before it is repeated


def sums_of(projects: Sequence[Project]) -> dict[int, DiskSum]:
    """Return the sums by project, for those that have jobs. With many jobs the sums are minutes old."""
    ids = [project.pk for project in projects]
    if _are_few(ids):
        return _add_up(ids)
    stored = DiskSum.objects.in_bulk(ids)
    missing = [project for project in ids if project not in stored]
    return stored | (_add_up(missing) if missing else {})  # in the first minutes after an upgrade


def update(now: datetime | None = None) -> int:
    """Update sums that have changed, where jobs are too many to add up at each request. Return how many projects."""
    now = now or timezone.now()
    ids = sorted(Project.objects.values_list("pk", flat=True))
    if _are_few(ids):
        return 0
    # Keeps the last of each project; with GROUP BY, SQLite would scan every job.
    lately = Job.objects.filter(disk_measured_at__gt=now - MAX_AGE).order_by("disk_measured_at")
    changed = dict(lately.values_list("project", "disk_measured_at"))
    stored, done = DiskSum.objects.in_bulk(), 0
    for project in ids:
        if (last := stored.get(project)) is not None:
            is_old = last.counted_at <= now - MAX_AGE or (changed.get(project) or last.counted_at) > last.counted_at
            if not is_old or now - last.counted_at < timedelta(seconds=last.seconds * PAUSE_FACTOR):
                continue
        began = time.monotonic()
        disk_sum = _add_up([project]).get(project) or DiskSum(project_id=project)
        disk_sum.counted_at, disk_sum.seconds = now, time.monotonic() - began
        disk_sum.save()
        done += 1
    return done


def _are_few(projects: Sequence[int]) -> bool:
    jobs = Job.objects.filter(project__in=projects).order_by()
    return jobs[: MAX_SUMMED_JOBS + 1].count() <= MAX_SUMMED_JOBS


def _add_up(projects: Sequence[int]) -> dict[int, DiskSum]:
    """Add up jobs and checkpoints by one query each; jobs through an index with all these columns, as rows are long."""
    stored = Checkpoint.objects.exclude(state=Checkpoint.State.PRUNED).filter(job__project__in=projects)
    # A checkpoint larger than twice its job's measured size (disks compress) cannot be there.
    stored = stored.filter(bytes__lte=F("job__disk_bytes") * 2)
    checkpoint_bytes = dict(stored.order_by().values_list("job__project").annotate(sum=Sum("bytes")))
    jobs = Job.objects.filter(project__in=projects).order_by().values("project_id")
    rows = jobs.annotate(
        jobs=Count("pk"),
        bytes=Sum("disk_bytes"),
        unmeasured=Count("pk", filter=Q(disk_measured_at=None)),
        partial=Count("pk", filter=Q(disk_is_partial=True)),
        oldest_job_at=Min("created_at"),
        measured_at=Min("disk_measured_at"),
    )
    return {
        row["project_id"]: DiskSum(checkpoint_bytes=checkpoint_bytes.get(row["project_id"], 0), **row) for row in rows
    }
