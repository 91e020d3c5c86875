"""What each project's jobs take on disk: added up at once where there are few jobs, else as last added up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db.models import Count, F, Min, Q, Sum
from django.utils import timezone

from jobs.models import Checkpoint, DiskSum, Job
from portal.models import Project

MOST = 10_000
"""Jobs that are added up whenever somebody looks."""
ANYWAY = timedelta(hours=1)  # after which sums are made anew, whatever was measured since: jobs are deleted, too
REST = 200  # times what adding up took, before it is done again


def of(projects: Sequence[Project]) -> dict[int, DiskSum]:
    """By project, of those that have jobs. Of many jobs the sums are minutes old."""
    ids = [project.pk for project in projects]
    if _are_few(ids):
        return _added_up(ids)
    kept = DiskSum.objects.in_bulk(ids)
    missing = [project for project in ids if project not in kept]
    return kept | (_added_up(missing) if missing else {})  # in the first minutes after an upgrade


def keep(now: datetime | None = None) -> int:
    """Add up what has changed since, where it is too much to be done at each look; answers how many projects."""
    now = now or timezone.now()
    ids = sorted(Project.objects.values_list("pk", flat=True))
    if _are_few(ids):
        return 0
    # The last of each project; grouped by it, SQLite would look through every job there is.
    lately = Job.objects.filter(disk_measured_at__gt=now - ANYWAY).order_by("disk_measured_at")
    changed = dict(lately.values_list("project", "disk_measured_at"))
    kept, done = DiskSum.objects.in_bulk(), 0
    for project in ids:
        if (one := kept.get(project)) is not None:
            is_old = one.counted_at <= now - ANYWAY or (changed.get(project) or one.counted_at) > one.counted_at
            if not is_old or now - one.counted_at < timedelta(seconds=one.seconds * REST):
                continue
        began = time.monotonic()
        found = _added_up([project]).get(project) or DiskSum(project_id=project)
        found.counted_at, found.seconds = now, time.monotonic() - began
        found.save()
        done += 1
    return done


def _are_few(projects: Sequence[int]) -> bool:
    jobs = Job.objects.filter(project__in=projects).order_by()
    return jobs[: MOST + 1].count() <= MOST


def _added_up(projects: Sequence[int]) -> dict[int, DiskSum]:
    """Jobs and checkpoints apart, each once; jobs by an index that has all of these columns, as their rows are long."""
    kept = Checkpoint.objects.exclude(state=Checkpoint.State.PRUNED).filter(job__project__in=projects)
    # One that is larger than all that was found of its job (doubled, as disks compress) does not lie there.
    kept = kept.filter(bytes__lte=F("job__disk_bytes") * 2)
    held = dict(kept.order_by().values_list("job__project").annotate(sum=Sum("bytes")))
    jobs = Job.objects.filter(project__in=projects).order_by().values("project_id")
    rows = jobs.annotate(
        jobs=Count("pk"),
        bytes=Sum("disk_bytes"),
        unmeasured=Count("pk", filter=Q(disk_measured_at=None)),
        partial=Count("pk", filter=Q(disk_is_partial=True)),
        oldest_job_at=Min("created_at"),
        measured_at=Min("disk_measured_at"),
    )
    return {row["project_id"]: DiskSum(checkpoint_bytes=held.get(row["project_id"], 0), **row) for row in rows}
