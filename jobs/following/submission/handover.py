"""Hand an attempt that is due to the scheduler, once.

    1. claim the row: `submitting_at` by a conditional update, so that one of two workers continues
    2. where an earlier claim was never finished: search the scheduler for the attempt's key first
    3. write the run directory, submit it, store the scheduler's id
An unknown outcome leaves the claim: after RETRY_AFTER, longer than any request may take, the next tick begins at 2.
A worker that slept that long finds another claim in the row: it changes nothing, and what it submitted is cancelled.
For an attempt that ends here while an outcome is unknown, the scheduler is searched a while longer (strays).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs import blamed_nodes, live
from jobs.disk import missing, tokens
from jobs.disk.prepare import prepare, submission
from jobs.errors import JobError
from jobs.following.cancellation import strays
from jobs.following.decisions import reconsider
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.ending import end
from jobs.following.submission import dependencies, sweep_limit
from jobs.models import Attempt, Job, Predecessor, Sweep
from nodes.cluster import sync
from nodes.schedulers.base import ENDED, JobStatus, Scheduler, SchedulerError, Submission
from portal.models import User

logger = logging.getLogger(__name__)

RETRY_AFTER = timedelta(seconds=30)
RECHECK_AFTER = timedelta(seconds=4)  # for the previous attempt
# Errors of a file system that may pass, such as those of an empty mount point: the attempt stays due.
TRANSIENT_ERRNOS = {
    errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN,
    errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EACCES, errno.EPERM,
}  # fmt: skip


def due(*, arrays: bool = False) -> list[int]:
    """Return the attempts that no scheduler has yet: new ones, and those whose submission was not finished.

    With `arrays`, attempts that are submitted together (jobs.following.submission.arrays) are left out.
    """
    together = Q(number=1, job__sweep__isnull=False) & ~Q(cancel_asked_at__isnull=False, submitting_at=None)
    apart = ~together if arrays else ~Q(pk__in=sweep_limit.waiting_attempts())
    return list(
        Attempt.objects.filter(apart, ended_at=None, scheduler_id="")
        .exclude(cancel_asked_at=None, job__in=Predecessor.objects.filter(met=False).values("job"))
        .filter(Q(submitting_at=None) | Q(submitting_at__lt=timezone.now() - RETRY_AFTER))
        .order_by("id")
        .values_list("id", flat=True)[:20]
    )


def is_same_job(attempt: Attempt, status: JobStatus) -> bool:
    """Return whether the status is of this attempt's job.

    A scheduler that was reinstalled, or restored from a backup, may have given the id to another job. A requeued job
    keeps its first attempt's key; a job of an array has its sweep's.
    """
    if attempt.job.is_attached:
        return status.may_belong_to(attempt.scheduler_user)
    if not status.keys:  # somebody has renamed it, or it was never submitted by Vigil
        was_submitted_then = status.may_be_submitted_between(attempt.created_at, attempt.submitted_at)
        return was_submitted_then and status.may_belong_to(attempt.scheduler_user)
    if attempt.key in status.keys:
        return True
    has_key = Q(attempts__key__in=status.keys) | Q(sweep__key__in=status.keys)
    return Job.objects.filter(has_key, pk=attempt.job_id).exists()


def hand_over(attempt_id: int, scheduler: Scheduler | None = None) -> None:
    """Submit one attempt if it is due. Safe to run twice at once, or again after a crash."""
    attempt = Attempt.objects.select_related("job__project", "job__owner", "resume_from").filter(pk=attempt_id).first()
    if attempt is None or attempt.scheduler_id or attempt.ended_at is not None:
        return
    if attempt.cancel_asked_at is None and dependencies.is_waiting(attempt.job_id):
        return
    claim = _claim(attempt)
    if claim is None:
        return
    try:
        source = scheduler or sync.scheduler()
        scheduler_id = _submit(attempt, claim, source)
    except SchedulerError as error:
        record_failure(attempt, claim, error)
        return
    except JobError as error:  # such as a project environment that somebody has damaged since
        record_failure(attempt, claim, SchedulerError(str(error), permanent=True))
        return
    except OSError as error:
        record_failure(
            attempt, claim, SchedulerError(missing.text_of(error), permanent=error.errno not in TRANSIENT_ERRNOS)
        )
        return
    if scheduler_id is not None:
        _record_submission(attempt, scheduler_id, source)


def _submit(attempt: Attempt, claim: datetime, source: Scheduler) -> str | None:
    """Return the scheduler's id of this attempt, found or new.

    None if it is not to start, not yet or not by this process.
    """
    if attempt.submitting_at is not None:
        existing_id = source.find(attempt.key, user=attempt.scheduler_user)
        if existing_id is not None:
            return existing_id
    if attempt.cancel_asked_at is not None:
        end_unsubmitted(attempt, claim, AttemptEnd("cancelled", cancelled=True))
        return None
    check_owner(attempt.job.owner)
    if (objection := reconsider.objection(attempt)) is not None:
        with transaction.atomic():
            if end_unsubmitted(attempt, claim, AttemptEnd("failed"), cause="withdrawn", reason=objection.text):
                objection.note()
        return None
    if not _may_start(attempt, claim, source):
        return None
    avoid_unhealthy_nodes([attempt], claim)
    request = submission(attempt, prepare(attempt))
    _check_grace(request)
    if not Attempt.objects.filter(claimed_at(claim), pk=attempt.pk, ended_at=None).exists():
        return None  # writing took so long that another process has claimed it since
    return source.submit(request)


def avoid_unhealthy_nodes(attempts: Sequence[Attempt], claim: datetime) -> None:
    """Exclude the nodes that health rules exclude now from first attempts, which request the same resources.

    Later attempts did so when they were created.
    """
    if attempts[0].number > 1:
        return
    excluded = blamed_nodes.excluded_nodes(attempts[0].job, before=1)
    if excluded == attempts[0].excluded_nodes:
        return
    for attempt in attempts:
        attempt.excluded_nodes = excluded
    rows = Attempt.objects.filter(claimed_at(claim), pk__in=[attempt.pk for attempt in attempts])
    rows.update(excluded_nodes=excluded)


def check_owner(owner: User) -> None:
    """Raise SchedulerError if the owner's account is deactivated: nothing is started in that name any more."""
    if not owner.is_active:
        message = f"The account of {owner} is deactivated, so nothing is started in that name."
        raise SchedulerError(f"{message} Somebody else may clone the job.", permanent=True)


def _check_grace(request: Submission) -> None:
    """Refuse a time limit too short to stop within: that is known only once checkpoints of this job were measured."""
    if request.grace_s >= request.time_limit_s:
        needs = f"Stopping with a last checkpoint takes {request.grace_s} s, as measured with the last one"
        message = f"{needs}, but the time limit is {request.time_limit_s} s. Submit with a longer resources.time_limit."
        raise SchedulerError(message, permanent=True)


def _claim(attempt: Attempt) -> datetime | None:
    """Claim the attempt for submission, unless another process is submitting it.

    Return the moment of the claim, or None.

    `attempt` keeps `submitting_at` of an earlier claim.
    """
    now = timezone.now()
    stale = Q(submitting_at=None) | Q(submitting_at__lt=now - RETRY_AFTER)
    rows = Attempt.objects.filter(stale, pk=attempt.pk, scheduler_id="", ended_at=None)
    attempt.scheduler_user = attempt.scheduler_user or attempt.job.owner.slurm_user or ""
    return now if rows.update(submitting_at=now, scheduler_user=attempt.scheduler_user) == 1 else None


def claimed_at(claim: datetime) -> Q:
    """Return the condition that a row is still under this claim and has no scheduler's id."""
    return Q(submitting_at=claim, scheduler_id="")


def _may_start(attempt: Attempt, claim: datetime, source: Scheduler) -> bool:
    """Return False while the scheduler still has an earlier attempt alive or requeued (protocols.md §1)."""
    before = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).exclude(scheduler_id="")
    ids = sorted(set(before.values_list("scheduler_id", flat=True)))
    # UNKNOWN counts as alive: nothing is started alongside a job whose state the scheduler does not know.
    if ids and any(
        status.state not in ENDED and is_same_job(attempt, status) for status in source.status(ids).values()
    ):
        rows = Attempt.objects.filter(claimed_at(claim), pk=attempt.pk)
        again = timezone.now() - RETRY_AFTER + RECHECK_AFTER  # not immediately: others are due as well
        rows.update(submitting_at=again, reason="Waiting for the previous attempt to end.")
        return False
    return True


def _record_submission(attempt: Attempt, scheduler_id: str, source: Scheduler) -> None:
    """Store its id, whoever holds the claim: the row follows one job, and any other with this key is cancelled."""
    rows = Attempt.objects.filter(pk=attempt.pk, scheduler_id="", ended_at=None)
    if rows.update(scheduler_id=scheduler_id, submitted_at=timezone.now(), reason="") != 1:
        if not Attempt.objects.filter(pk=attempt.pk, scheduler_id=scheduler_id).exists():
            strays.cancel_late_submission(attempt, scheduler_id, source)
        return
    attempt.scheduler_id = scheduler_id
    logger.info("attempt %s: submitted as %s", attempt.pk, scheduler_id)
    tokens.leave(attempt)
    live.announce(attempt.pk)


def record_failure(attempt: Attempt, claim: datetime, error: SchedulerError, *, sweep: Sweep | None = None) -> None:
    """Fail the attempt if the scheduler refused it.

    If the scheduler was not reached, keep it due, with the error as reason.
    """
    if error.permanent:
        end_unsubmitted(attempt, claim, AttemptEnd("failed"), cause="rejected", reason=str(error), sweep=sweep)
        return
    logger.warning("attempt %s: not submitted, tried again: %s", attempt.pk, error)
    Attempt.objects.filter(claimed_at(claim), pk=attempt.pk).update(reason=f"Not submitted yet: {error}")
    live.announce(attempt.pk)


def end_unsubmitted(
    attempt: Attempt,
    claim: datetime,
    ended: AttemptEnd,
    *,
    reason: str = "",
    cause: str = "",
    sweep: Sweep | None = None,
) -> bool:
    """End an attempt without a job in the scheduler. Return whether this call ended it.

    If an earlier request may still arrive there, it is watched for; `sweep`: in whose array it was to be.
    """
    with transaction.atomic():
        is_over = end(attempt, ended, cause=cause, reason=reason, only=claimed_at(claim))
        if is_over and attempt.submitting_at is not None:
            strays.watch_for(attempt, sweep=sweep)
    return is_over
