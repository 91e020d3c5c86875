"""How much disk run directories use: measured in the background, job by job, when something may have changed."""

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

AGAIN_AFTER = timedelta(minutes=15)  # while a job runs
LOOK_BACK = timedelta(days=7)  # for changes after a job was measured: far longer than they ever wait for their turn
BUDGET_S = 10.0  # of one go; the worker is niced, and others wait for it
MOST_ENTRIES = 1_000_000
DEEPEST = 32
_BLOCK = 512  # what st_blocks counts in, on every system


@dataclass(frozen=True)
class Size:
    """What a folder takes on disk; `is_partial` if not all of it was counted."""

    bytes: int
    is_partial: bool


# Measuring


def measure_due(budget_s: float = BUDGET_S) -> int:
    """Measure what may have changed, longest ago first, for so long; answers how many jobs that were. Then add up."""
    deadline = time.monotonic() + budget_s
    measured = 0
    for job in due().only("directory").order_by(F("disk_measured_at").asc(nulls_first=True), "pk")[:1000]:
        if time.monotonic() > deadline:
            break
        measure(job, budget_s)
        measured += 1
    sums.keep()
    return measured


def due() -> QuerySet[Job]:
    """Never measured; running, and measured a while ago; or something ended, closed or was removed since."""
    now = timezone.now()
    parts = [Attempt.objects.alive().filter(job__disk_measured_at__lt=now - AGAIN_AFTER)]
    for change in ("ended_at", "closed_at", "spools_removed_at"):
        # By its own index, and of late: what every attempt there ever was says is not asked each minute.
        lately = Attempt.objects.filter(**{f"{change}__gte": now - LOOK_BACK})
        parts.append(lately.filter(**{f"{change}__gte": F("job__disk_measured_at")}))
    never = Job.objects.filter(disk_measured_at=None).order_by().values("pk")
    # A union, and not any of these: PostgreSQL looks at every job to see whether it is among one or another.
    return Job.objects.filter(pk__in=never.union(*(part.order_by().values("job") for part in parts)))


def measure(job: Job, budget_s: float = BUDGET_S) -> None:
    """Count one job's run directory and write it down, with the time at which counting began."""
    began = timezone.now()
    try:
        size = _size_of(job, time.monotonic() + budget_s)
    except OSError as error:  # the file system is away, say: what was known stays, others get their turn
        logger.warning("job %s: its run directory cannot be measured: %s", job.pk, error)
        Job.objects.filter(pk=job.pk).update(disk_measured_at=began)
        return
    Job.objects.filter(pk=job.pk).update(disk_bytes=size.bytes, disk_is_partial=size.is_partial, disk_measured_at=began)


def _size_of(job: Job, deadline: float) -> Size:
    if not job.directory:
        return Size(0, False)
    try:
        with rundir.folder_under(rundir.runs_root(), job.directory) as folder:
            return size_of(folder, deadline=deadline)
    except FileNotFoundError:
        if rundir.is_away(job.directory):
            raise
        return Size(0, False)


def size_of(folder: int, *, deadline: float, most_entries: int = MOST_ENTRIES) -> Size:
    """What everything below an open folder takes: blocks, not lengths, so that holes count nothing.

    The job filled it: no link is followed, no other file system entered, nothing opened but folders, nothing counted
    twice, and neither depth nor number is believed.
    """
    device, seen, total = os.fstat(folder).st_dev, set[int](), 0
    entries = _walk(folder, device, DEEPEST)
    for count, found in enumerate(entries):
        if found is None or count >= most_entries or time.monotonic() > deadline:
            entries.close()
            return Size(total, True)
        if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
            if found.st_ino in seen:
                continue
            seen.add(found.st_ino)
        total += found.st_blocks * _BLOCK
    return Size(total, False)


def _walk(folder: int, device: int, depth: int) -> Generator[os.stat_result | None, None, None]:
    """Everything below a folder; None where it goes deeper than we do."""
    with os.scandir(folder) as names:
        for name in names:
            try:
                found = name.stat(follow_symlinks=False)
            except OSError:  # gone meanwhile
                continue
            if found.st_dev != device:
                continue
            yield found
            if not stat.S_ISDIR(found.st_mode):
                continue
            if depth == 0:
                yield None
                continue
            try:
                inner = os.open(name.name, rundir.OPEN_FOLDER, dir_fd=folder)
            except OSError:  # gone meanwhile, or the job keeps it to itself
                continue
            try:
                yield from _walk(inner, device, depth - 1)
            finally:
                os.close(inner)


# Reading


@dataclass(frozen=True)
class Use:
    """What a project's jobs take."""

    project: Project
    jobs: int
    bytes: int
    checkpoint_bytes: int  # as their trainers told, of jobs that `bytes` has
    unmeasured: int  # jobs that no look has counted yet
    partial: int  # jobs of which there is more than was counted
    oldest_job_at: datetime | None
    measured_at: datetime | None  # the oldest look that is in the sum

    @classmethod
    def of(cls, project: Project, one: DiskSum | None) -> Use:
        if one is None:
            return cls(project, 0, 0, 0, 0, 0, None, None)
        return cls(
            project, one.jobs, one.bytes, one.checkpoint_bytes, one.unmeasured, one.partial, one.oldest_job_at,
            one.measured_at,
        )  # fmt: skip

    @property
    def keep_checkpoints_days(self) -> int | None:
        return self.project.keep_checkpoints_days

    @property
    def is_told_more(self) -> bool:
        """Trainers told of more than lies there: the two sums are of different moments, and not to be compared."""
        return self.checkpoint_bytes > self.bytes

    @property
    def other_bytes(self) -> int | None:
        """Logs, code, results, and what no trainer told of; None where the sums cannot say."""
        return None if self.is_told_more else self.bytes - self.checkpoint_bytes


def may_see(user: User) -> bool:
    return projects_of(user).exists()


def projects_of(user: User) -> QuerySet[Project]:
    """The projects whose disk use is this person's business: all for sysadmins, else those that they lead."""
    if user.is_sysadmin:
        return Project.objects.all()
    led = user.memberships.filter(role=Membership.Role.LEAD).values("project")
    return Project.objects.filter(pk__in=led)


def use_of(user: User) -> list[Use]:
    """Each such project's use, the largest first."""
    projects = list(projects_of(user))
    added_up = sums.of(projects)
    uses = [Use.of(project, added_up.get(project.pk)) for project in projects]
    return sorted(uses, key=lambda use: (-use.bytes, use.project.slug))


def largest(user: User, most: int = 20) -> list[Job]:
    """The jobs that take most in these projects: the first of an index, or the first of each project's."""
    there = Job.objects.filter(disk_bytes__gt=0).order_by("-disk_bytes", "-pk")
    if not user.is_sysadmin:
        each = (there.filter(project=project).values_list("disk_bytes", "pk") for project in projects_of(user))
        found = sorted((row for rows in each for row in rows.order_by("-disk_bytes")[:most]), reverse=True)
        there = there.filter(pk__in=[pk for _, pk in found[:most]])
    keys = list(there.values_list("pk", flat=True)[:most])
    rows = Job.objects.with_latest_attempt().defer("spec", "spec_toml", "notes").in_bulk(keys)
    return [rows[key] for key in keys if key in rows]
