"""Remove spools some days after their attempt has closed, and checkpoints by their project's retention.

By then every line of a spool is in the database. Logs and results stay as long as the job does; so do checkpoints,
unless the project sets after how many days from a job's end only the last one stays.
"""

from __future__ import annotations

import logging
import shutil
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Count, Q, QuerySet
from django.utils import timezone

from jobs import checkpoints
from jobs.disk import rundir, trash
from jobs.models import Attempt, Checkpoint, Event, Job
from portal.access import note
from portal.audit import Change
from portal.models import Project, User

logger = logging.getLogger(__name__)

MAX_PER_RUN = 1_000  # in random order: entries that cannot be removed must not delay the rest


def remove_spools() -> int:
    """Remove the spools of attempts that closed VIGIL_SPOOL_DAYS ago. Return the number of attempts."""
    before = timezone.now() - timedelta(days=settings.VIGIL_SPOOL_DAYS)
    due = Attempt.objects.filter(closed_at__lt=before, spools_removed_at=None).with_job().order_by("?")
    done = [attempt.pk for attempt in due[:MAX_PER_RUN] if _remove(attempt)]
    Attempt.objects.filter(pk__in=done).update(spools_removed_at=timezone.now())
    return len(done)


def _remove(attempt: Attempt) -> bool:
    """Remove an attempt's spools without following links, as the job filled the folder.

    Return whether none are left.
    """
    if not attempt.directory or not attempt.job.directory:
        return True
    try:
        with rundir.folder_under(rundir.path_of(attempt.job.directory), f"job/{attempt.directory}") as folder:
            shutil.rmtree("spool", dir_fd=folder)
    except FileNotFoundError:
        return not rundir.is_unreachable(attempt.job.directory)
    except (OSError, RecursionError) as error:
        logger.warning("attempt %s: its spools cannot be removed: %s", attempt.pk, error)
        return False
    return True


# Checkpoints


def set_retention(user: User, project: Project, days: int | None) -> None:
    """Set after how many days from a job's end its earlier checkpoints go; None: never.

    The caller checks the permission.
    """
    before = Project.objects.values_list("keep_checkpoints_days", flat=True).get(pk=project.pk)
    if Project.objects.filter(pk=project.pk).exclude(keep_checkpoints_days=days).update(keep_checkpoints_days=days):
        change = Change(before={"keep_checkpoints_days": before}, after={"keep_checkpoints_days": days})
        note(user, "project.keep_checkpoints", project, f"{days} days" if days else "forever", change)


def remove_checkpoints() -> int:
    """Remove checkpoints beyond their project's retention. Return how many."""
    now, removed = timezone.now(), 0
    for project in Project.objects.exclude(keep_checkpoints_days=None):
        ended_before = now - timedelta(days=project.keep_checkpoints_days or 0)
        for job_id in _long_ended(project, ended_before).values_list("pk", flat=True)[:MAX_PER_RUN]:
            try:
                removed += _prune_checkpoints(job_id, ended_before)
            except OSError as error:
                logger.warning("job %s: its checkpoints cannot be removed: %s", job_id, error)
    return removed


def _long_ended(project: Project, ended_before: datetime) -> QuerySet[Job]:
    """Return jobs that ended before that time and may have a checkpoint to remove."""
    there = Q(checkpoints__pinned=False) & ~Q(checkpoints__state=Checkpoint.State.PRUNED)
    over = Job.objects.filter(project=project, latest__ended_at__lt=ended_before).exclude(directory="")
    return over.annotate(there=Count("checkpoints", filter=there)).filter(there__gt=1).order_by("?")


def _prune_checkpoints(job_id: int, ended_before: datetime) -> int:
    """Remove a job's checkpoints except those that must stay. Return how many.

    It holds the lock that resuming takes, so that nobody starts from a checkpoint that is being removed. Folders are
    renamed first: after a failure the row remains, and the next run finds its folder gone.
    """
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",)).select_related("project").filter(pk=job_id).first()
        if job is None or not _is_over(job, ended_before):
            return 0
        retained = _retained(job)
        if not retained:
            return 0  # no checkpoint to resume from exists for certain, so none is removed
        discarded = []
        for checkpoint in job.checkpoints.exclude(state=Checkpoint.State.PRUNED).exclude(pk__in=retained):
            if _discard(job, checkpoint):
                discarded.append(checkpoint)
        if discarded:
            _record_pruned(job, discarded)
        return len(discarded)


def _is_over(job: Job, ended_before: datetime) -> bool:
    """Return whether every attempt ended before that time, is decided, and accepts no more reports."""
    late = Q(ended_at=None) | Q(ended_at__gte=ended_before) | Q(decided_at=None) | Q(closed_at=None)
    return job.latest is not None and not job.attempts.filter(late).exists()


def _retained(job: Job) -> set[int]:
    """Return the ids to retain: the newest of the line, the newest verified, pinned ones, and starts of attempts."""
    assert job.latest is not None
    newest = checkpoints.newest_on_line(job.latest)
    if newest is None or not _is_on_disk(job, newest):
        return set()
    retained = {newest.pk, *job.checkpoints.pinned().values_list("pk", flat=True)}
    if newest.state != Checkpoint.State.VERIFIED:
        verified = job.checkpoints.filter(state=Checkpoint.State.VERIFIED).order_by("-generation", "-step").first()
        retained |= {verified.pk} if verified else set()
    using = Attempt.objects.filter(resume_from__job=job, ended_at=None).values_list("resume_from", flat=True)
    return retained | {pk for pk in using if pk is not None}


def _is_on_disk(job: Job, checkpoint: Checkpoint) -> bool:
    """Return whether the folder is where its row says: somebody may have moved or removed it manually."""
    try:
        return rundir.has_checkpoint(job.directory, checkpoint.name)
    except OSError:
        return False


def _discard(job: Job, checkpoint: Checkpoint) -> bool:
    """Move a checkpoint to the trash. Return whether its folder is gone."""
    try:
        trash.discard_checkpoint(job.directory, checkpoint.name)
    except FileNotFoundError:
        # It is already gone, unless all of them are, as while the file system is not mounted.
        return bool(rundir.names_under(rundir.path_of(job.directory), "job/checkpoints"))
    except OSError as error:
        logger.warning("checkpoint %s of #%s cannot be removed: %s", checkpoint.name, job.pk, error)
        return False
    return True


def _record_pruned(job: Job, gone: list[Checkpoint]) -> None:
    days, size = job.project.keep_checkpoints_days, sum(checkpoint.bytes for checkpoint in gone)
    Checkpoint.objects.filter(pk__in=[checkpoint.pk for checkpoint in gone]).update(state=Checkpoint.State.PRUNED)
    Job.objects.filter(pk=job.pk).update(disk_measured_at=None)  # to be measured again
    now = timezone.now()
    details = [
        {"step": c.step, "name": c.name, "generation": c.generation, "bytes": c.bytes, "days": days} for c in gone
    ]
    assert job.latest is not None
    latest = job.latest
    Event.objects.bulk_create(Event(attempt=latest, time=now, kind="checkpoint.expired", data=data) for data in details)
    names = ", ".join(checkpoint.name for checkpoint in gone)
    note(None, "checkpoints.expired", job, f"{size:,} bytes, {days} days after its end: {names}")
    logger.info("job %s: removed %s checkpoints (%s bytes), %s days after its end", job.pk, len(gone), size, days)
