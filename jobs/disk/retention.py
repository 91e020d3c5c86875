"""How long what jobs leave on disk is kept: spools go some days after the attempt has closed.

By then every line of them is in the database. Logs and results stay for as long as the job does; so do checkpoints,
unless the project says after how many days from a job's end only the last one stays.
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

FOR_EVER = 100_000  # days; a date that far back can still be told
AT_ONCE = 1_000  # in any order: what cannot be removed must not keep the rest waiting


def remove_spools() -> int:
    """Remove the spools of attempts that closed VIGIL_SPOOL_DAYS ago; answers how many attempts that were."""
    before = timezone.now() - timedelta(days=min(settings.VIGIL_SPOOL_DAYS, FOR_EVER))
    due = Attempt.objects.filter(closed_at__lt=before, spools_removed_at=None).with_job().order_by("?")
    done = [attempt.pk for attempt in due[:AT_ONCE] if _remove(attempt)]
    Attempt.objects.filter(pk__in=done).update(spools_removed_at=timezone.now())
    return len(done)


def _remove(attempt: Attempt) -> bool:
    """Whether there is none any more. The folder was the job's to fill: no link in it is followed."""
    if not attempt.directory or not attempt.job.directory:
        return True
    try:
        with rundir.folder_under(rundir.path_of(attempt.job.directory), f"job/{attempt.directory}") as folder:
            shutil.rmtree("spool", dir_fd=folder)
    except FileNotFoundError:
        return not rundir.is_away(attempt.job.directory)
    except (OSError, RecursionError) as error:
        logger.warning("attempt %s: its spools cannot be removed: %s", attempt.pk, error)
        return False
    return True


# Checkpoints


def set_keep(user: User, project: Project, days: int | None) -> None:
    """How many days after a job's end its earlier checkpoints go; None: never. Whoever asks may manage the project."""
    before = Project.objects.values_list("keep_checkpoints_days", flat=True).get(pk=project.pk)
    if Project.objects.filter(pk=project.pk).exclude(keep_checkpoints_days=days).update(keep_checkpoints_days=days):
        change = Change(before={"keep_checkpoints_days": before}, after={"keep_checkpoints_days": days})
        note(user, "project.keep_checkpoints", project, f"{days} days" if days else "for ever", change)


def remove_checkpoints() -> int:
    """Remove what the projects keep no longer; answers how many checkpoints went."""
    now, removed = timezone.now(), 0
    for project in Project.objects.exclude(keep_checkpoints_days=None):
        ended_before = now - timedelta(days=project.keep_checkpoints_days or 0)
        for job_id in _long_ended(project, ended_before).values_list("pk", flat=True)[:AT_ONCE]:
            try:
                removed += _thin_out(job_id, ended_before)
            except OSError as error:
                logger.warning("job %s: its checkpoints cannot be removed: %s", job_id, error)
    return removed


def _long_ended(project: Project, ended_before: datetime) -> QuerySet[Job]:
    """Jobs that ended before, and may have a checkpoint to remove."""
    there = Q(checkpoints__pinned=False) & ~Q(checkpoints__state=Checkpoint.State.PRUNED)
    over = Job.objects.filter(project=project, latest__ended_at__lt=ended_before).exclude(directory="")
    return over.annotate(there=Count("checkpoints", filter=there)).filter(there__gt=1).order_by("?")


def _thin_out(job_id: int, ended_before: datetime) -> int:
    """Remove a job's checkpoints but those that must stay. Under the lock that resuming takes: nobody starts from one
    that goes. Folders are renamed first: what goes wrong then leaves a row whose folder the next go finds gone."""
    with transaction.atomic():
        job = Job.objects.select_for_update(of=("self",)).select_related("project").filter(pk=job_id).first()
        if job is None or not _is_over(job, ended_before):
            return 0
        stay = _must_stay(job)
        if not stay:
            return 0  # nothing to resume from is known and there: then nothing is removed either
        gone = []
        for checkpoint in job.checkpoints.exclude(state=Checkpoint.State.PRUNED).exclude(pk__in=stay):
            if _discard(job, checkpoint):
                gone.append(checkpoint)
        if gone:
            _write_down(job, gone)
        return len(gone)


def _is_over(job: Job, ended_before: datetime) -> bool:
    """Every attempt has ended before that time, is decided upon, and takes no report any more."""
    late = Q(ended_at=None) | Q(ended_at__gte=ended_before) | Q(decided_at=None) | Q(closed_at=None)
    return job.latest is not None and not job.attempts.filter(late).exists()


def _must_stay(job: Job) -> set[int]:
    """The newest on the line, the newest verified one if that is another, pinned ones, what an attempt starts from."""
    assert job.latest is not None
    newest = checkpoints.newest_on_line(job.latest)
    if newest is None or not _is_on_disk(job, newest):
        return set()
    stay = {newest.pk, *job.checkpoints.pinned().values_list("pk", flat=True)}
    if newest.state != Checkpoint.State.VERIFIED:
        verified = job.checkpoints.filter(state=Checkpoint.State.VERIFIED).order_by("-generation", "-step").first()
        stay |= {verified.pk} if verified else set()
    using = Attempt.objects.filter(resume_from__job=job, ended_at=None).values_list("resume_from", flat=True)
    return stay | {pk for pk in using if pk is not None}


def _is_on_disk(job: Job, checkpoint: Checkpoint) -> bool:
    """Whether it is where its row says: somebody may have moved or removed it by hand."""
    try:
        return rundir.has_checkpoint(job.directory, checkpoint.name)
    except OSError:
        return False


def _discard(job: Job, checkpoint: Checkpoint) -> bool:
    """Whether its folder is gone."""
    try:
        trash.discard_checkpoint(job.directory, checkpoint.name)
    except FileNotFoundError:
        # Gone by itself; unless all of them are, as when the file system is away.
        return bool(rundir.names_under(rundir.path_of(job.directory), "job/checkpoints"))
    except OSError as error:
        logger.warning("checkpoint %s of #%s cannot be removed: %s", checkpoint.name, job.pk, error)
        return False
    return True


def _write_down(job: Job, gone: list[Checkpoint]) -> None:
    days, size = job.project.keep_checkpoints_days, sum(checkpoint.bytes for checkpoint in gone)
    Checkpoint.objects.filter(pk__in=[checkpoint.pk for checkpoint in gone]).update(state=Checkpoint.State.PRUNED)
    Job.objects.filter(pk=job.pk).update(disk_measured_at=None)  # to be measured again
    now = timezone.now()
    told = [{"step": c.step, "name": c.name, "generation": c.generation, "bytes": c.bytes, "days": days} for c in gone]
    assert job.latest is not None
    latest = job.latest
    Event.objects.bulk_create(Event(attempt=latest, time=now, kind="checkpoint.expired", data=data) for data in told)
    names = ", ".join(checkpoint.name for checkpoint in gone)
    note(None, "checkpoints.expired", job, f"{size:,} bytes, {days} days after its end: {names}")
    logger.info("job %s: removed %s checkpoints (%s bytes), %s days after its end", job.pk, len(gone), size, days)
