"""Measure the disk use of run directories in the background, job by job, when something may have changed."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Generator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import F, QuerySet
from django.utils import timezone

from jobs.disk import rundir, sums
from jobs.models import Attempt, DiskSum, Job
from portal.models import Membership, Project, User

logger = logging.getLogger(__name__)

REMEASURE_AFTER = timedelta(minutes=15)  # while a job runs
CHANGED_WITHIN = timedelta(
    days=7
)  # for changes after a job was measured: far longer than they ever wait for their turn
BUDGET_S = 10.0  # of one go; the worker is niced, and others wait for it
MAX_ENTRIES = 1_000_000
MAX_DEPTH = 32
_BLOCK = 512  # what st_blocks counts in, on every system


@dataclass(frozen=True)
class DiskSize:
    """The disk use of a folder; `is_partial` if not all of it was counted."""

    bytes: int
    is_partial: bool


# Measuring


def measure_due(budget_s: float = BUDGET_S) -> int:
    """Measure jobs that may have changed, the longest ago first, for so long, then add up. Return how many jobs."""
    deadline = time.monotonic() + budget_s
    measured = 0
    for job in due().only("directory").order_by(F("disk_measured_at").asc(nulls_first=True), "pk")[:1000]:
        if time.monotonic() > deadline:
            break
        measure(job, budget_s)
        measured += 1
    sums.update()
    return measured


def due() -> QuerySet[Job]:
    """Return jobs never measured; running, and measured a while ago; or ended, closed or cleaned up since."""
    now = timezone.now()
    parts = [Attempt.objects.alive().filter(job__disk_measured_at__lt=now - REMEASURE_AFTER)]
    for change in ("ended_at", "closed_at", "spools_removed_at"):
        # Each by its own index, and only recent changes: every attempt ever made is not scanned each minute.
        lately = Attempt.objects.filter(**{f"{change}__gte": now - CHANGED_WITHIN})
        parts.append(lately.filter(**{f"{change}__gte": F("job__disk_measured_at")}))
    never = Job.objects.filter(disk_measured_at=None).order_by().values("pk")
    # A union, not a disjunction, for which PostgreSQL would check every job against each part.
    return Job.objects.filter(pk__in=never.union(*(part.order_by().values("job") for part in parts)))


def measure(job: Job, budget_s: float = BUDGET_S) -> None:
    """Measure one job's run directory and store the result, with the time at which counting began."""
    began = timezone.now()
    try:
        size = _size_of(job, time.monotonic() + budget_s)
    except OSError as error:  # such as an unmounted file system: the last size stays, and other jobs get their turn
        logger.warning("job %s: its run directory cannot be measured: %s", job.pk, error)
        Job.objects.filter(pk=job.pk).update(disk_measured_at=began)
        return
    Job.objects.filter(pk=job.pk).update(disk_bytes=size.bytes, disk_is_partial=size.is_partial, disk_measured_at=began)


def _size_of(job: Job, deadline: float) -> DiskSize:
    if not job.directory:
        return DiskSize(0, False)
    try:
        with rundir.folder_under(rundir.runs_root(), job.directory) as folder:
            return size_of(folder, deadline=deadline)
    except FileNotFoundError:
        if rundir.is_unreachable(job.directory):
            raise
        return DiskSize(0, False)


def size_of(folder: int, *, deadline: float, most_entries: int = MAX_ENTRIES) -> DiskSize:
    """Return the disk use of everything below an open folder, in blocks, so that holes count nothing.

    The job filled it: no link is followed, no other file system entered, nothing opened but folders, nothing counted
    twice, and neither depth nor number is trusted.
    """
    device, linked_inodes, total = os.fstat(folder).st_dev, set[int](), 0
    entries = _walk(folder, device, MAX_DEPTH)
    for count, status in enumerate(entries):
        if status is None or count >= most_entries or time.monotonic() > deadline:
            entries.close()
            return DiskSize(total, True)
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if status.st_ino in linked_inodes:
                continue
            linked_inodes.add(status.st_ino)
        total += status.st_blocks * _BLOCK
    return DiskSize(total, False)


def _walk(folder: int, device: int, depth: int) -> Generator[os.stat_result | None, None, None]:
    """Yield the status of everything below a folder; None for folders deeper than DEEPEST."""
    with os.scandir(folder) as names:
        for name in names:
            try:
                status = name.stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            if status.st_dev != device:
                continue
            yield status
            if not stat.S_ISDIR(status.st_mode):
                continue
            if depth == 0:
                yield None
                continue
            try:
                inner = os.open(name.name, rundir.OPEN_FOLDER, dir_fd=folder)
            except OSError:  # gone meanwhile, or closed by the job
                continue
            try:
                yield from _walk(inner, device, depth - 1)
            finally:
                os.close(inner)


# Reading


@dataclass(frozen=True)
class ProjectDiskUse:
    """The disk use of a project's jobs."""

    project: Project
    jobs: int
    bytes: int
    checkpoint_bytes: int  # as reported by trainers, of jobs included in `bytes`
    unmeasured: int  # jobs that have not been measured yet
    partial: int  # jobs that were only measured in part
    oldest_job_at: datetime | None
    measured_at: datetime | None  # the oldest measurement in the sum

    @classmethod
    def from_sum(cls, project: Project, stored: DiskSum | None) -> ProjectDiskUse:
        if stored is None:
            return cls(project, 0, 0, 0, 0, 0, None, None)
        return cls(
            project, stored.jobs, stored.bytes, stored.checkpoint_bytes, stored.unmeasured, stored.partial,
            stored.oldest_job_at,
            stored.measured_at,
        )  # fmt: skip

    @property
    def keep_checkpoints_days(self) -> int | None:
        return self.project.keep_checkpoints_days

    @property
    def is_inconsistent(self) -> bool:
        """Return whether trainers reported more than was measured: the two sums are of different moments."""
        return self.checkpoint_bytes > self.bytes

    @property
    def other_bytes(self) -> int | None:
        """Return the bytes of logs, code and results, or None if the sums are inconsistent."""
        return None if self.is_inconsistent else self.bytes - self.checkpoint_bytes


def may_see(user: User) -> bool:
    return projects_of(user).exists()


def projects_of(user: User) -> QuerySet[Project]:
    """Return the projects whose disk use this person may see: all for sysadmins, else those that they lead."""
    if user.is_sysadmin:
        return Project.objects.all()
    led_projects = user.memberships.filter(role=Membership.Role.LEAD).values("project")
    return Project.objects.filter(pk__in=led_projects)


def disk_use(user: User) -> list[ProjectDiskUse]:
    """Return the disk use of each such project, the largest first."""
    projects = list(projects_of(user))
    sums_by_project = sums.sums_of(projects)
    uses = [ProjectDiskUse.from_sum(project, sums_by_project.get(project.pk)) for project in projects]
    return sorted(uses, key=lambda use: (-use.bytes, use.project.slug))


def largest(user: User, most: int = 20) -> list[Job]:
    """Return the largest jobs of these projects: the first of an index, or of each project's."""
    there = Job.objects.filter(disk_bytes__gt=0).order_by("-disk_bytes", "-pk")
    if not user.is_sysadmin:
        each = (there.filter(project=project).values_list("disk_bytes", "pk") for project in projects_of(user))
        found = sorted((row for rows in each for row in rows.order_by("-disk_bytes")[:most]), reverse=True)
        there = there.filter(pk__in=[pk for _, pk in found[:most]])
    keys = list(there.values_list("pk", flat=True)[:most])
    rows = Job.objects.with_latest_attempt().defer("spec", "spec_toml", "notes").in_bulk(keys)
    return [rows[key] for key in keys if key in rows]
