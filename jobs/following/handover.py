"""Hand an attempt that is due to the scheduler, once.

    1. claim the row: `submitting_at` by a conditional update; of two workers one goes on
    2. a claim that somebody made before and never finished: look for the attempt's key first
    3. write the run directory, ask the scheduler, write down its id
An unknown outcome leaves the claim: after RETRY, longer than any request may take, the next tick begins at 2.
A worker that slept that long finds another claim in the row: it changes nothing, and what it submitted is cancelled.
What ends here while an outcome is unknown is looked out for a while longer (strays).
"""

from __future__ import annotations

import errno
import logging
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs import live
from jobs.disk import missing, tokens
from jobs.disk.prepare import prepare, submission
from jobs.errors import JobError
from jobs.following import dependencies, reconsider, strays, sweep_limit
from jobs.following.cause import Ended
from jobs.following.ending import end
from jobs.models import Attempt, Job, Predecessor, Sweep
from nodes.cluster import sync
from nodes.schedulers.base import ENDED, JobStatus, Scheduler, SchedulerError, Submission
from portal.models import User

logger = logging.getLogger(__name__)

RETRY = timedelta(seconds=30)
WAIT = timedelta(seconds=4)  # for the attempt before
# What a file system may say today and not tomorrow, as an empty mount point does: such an attempt stays due.
PASSING = {
    errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOTCONN,
    errno.EMFILE, errno.ENFILE, errno.EROFS, errno.EACCES, errno.EPERM,
}  # fmt: skip


def due(*, arrays: bool = False) -> list[int]:
    """Attempts that no scheduler has yet: new ones, and those whose submission did not come to an end.

    `arrays`: without those that are handed over together (arrays). Else a sweep's wait here for their tick.
    """
    together = Q(number=1, job__sweep__isnull=False) & ~Q(cancel_asked_at__isnull=False, submitting_at=None)
    apart = ~together if arrays else ~Q(pk__in=sweep_limit.held())
    return list(
        Attempt.objects.filter(apart, ended_at=None, scheduler_id="")
        .exclude(cancel_asked_at=None, job__in=Predecessor.objects.filter(met=False).values("job"))
        .filter(Q(submitting_at=None) | Q(submitting_at__lt=timezone.now() - RETRY))
        .order_by("id")
        .values_list("id", flat=True)[:20]
    )


def is_of(attempt: Attempt, status: JobStatus) -> bool:
    """Whether the scheduler speaks of this job: one that was set up anew, as where a backup is restored, has given the
    id to another. What it requeued keeps the first attempt's key; what was of an array has its sweep's."""
    if attempt.job.is_attached:
        return status.may_belong_to(attempt.scheduler_user)
    if not status.keys:  # somebody has renamed it; or it is anybody's, past us
        is_of_then = status.may_be_submitted_between(attempt.created_at, attempt.submitted_at)
        return is_of_then and status.may_belong_to(attempt.scheduler_user)
    if attempt.key in status.keys:
        return True
    mine = Q(attempts__key__in=status.keys) | Q(sweep__key__in=status.keys)
    return Job.objects.filter(mine, pk=attempt.job_id).exists()


def hand_over(attempt_id: int, scheduler: Scheduler | None = None) -> None:
    """Submit one attempt if it is due; twice at once or after a crash is no harm."""
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
        scheduler_id = _ask(attempt, claim, source)
    except SchedulerError as error:
        not_taken(attempt, claim, error)
        return
    except JobError as error:  # as a project's environment that somebody has spoilt since
        not_taken(attempt, claim, SchedulerError(str(error), permanent=True))
        return
    except OSError as error:
        not_taken(attempt, claim, SchedulerError(missing.text_of(error), permanent=error.errno not in PASSING))
        return
    if scheduler_id is not None:
        _taken(attempt, scheduler_id, source)


def _ask(attempt: Attempt, claim: datetime, source: Scheduler) -> str | None:
    """The scheduler's id of this attempt, looked up or new; None where it is not to start, not yet or not by us."""
    if attempt.submitting_at is not None:
        known = source.find(attempt.key, user=attempt.scheduler_user)
        if known is not None:
            return known
    if attempt.cancel_asked_at is not None:
        end_unsubmitted(attempt, claim, Ended("cancelled", cancelled=True))
        return None
    check_owner(attempt.job.owner)
    if (against := reconsider.objection(attempt)) is not None:
        with transaction.atomic():
            if end_unsubmitted(attempt, claim, Ended("failed"), cause="withdrawn", reason=against.text):
                against.note()
        return None
    if not _may_start(attempt, claim, source):
        return None
    asked = submission(attempt, prepare(attempt))
    _check_grace(asked)
    if not Attempt.objects.filter(under(claim), pk=attempt.pk, ended_at=None).exists():
        return None  # writing took so long that somebody else is at it, or was
    return source.submit(asked)


def check_owner(owner: User) -> None:
    """Refuses a job of a deactivated account: nothing is started in that name any more."""
    if not owner.is_active:
        message = f"The account of {owner} is deactivated, and nothing is started in that name any more."
        raise SchedulerError(f"{message} Somebody else may clone it.", permanent=True)


def _check_grace(asked: Submission) -> None:
    """Refuses a time limit too short to stop within: known only once checkpoints of this job were measured."""
    if asked.grace_s >= asked.time_limit_s:
        needs = f"Stopping with a last checkpoint takes {asked.grace_s} s by the last one's measure"
        message = f"{needs}, the time limit is {asked.time_limit_s} s. Submit it with a longer resources.time_limit."
        raise SchedulerError(message, permanent=True)


def _claim(attempt: Attempt) -> datetime | None:
    """Ours to submit since this moment, unless somebody else is just doing it. `attempt` keeps the earlier claim's."""
    now = timezone.now()
    stale = Q(submitting_at=None) | Q(submitting_at__lt=now - RETRY)
    rows = Attempt.objects.filter(stale, pk=attempt.pk, scheduler_id="", ended_at=None)
    attempt.scheduler_user = attempt.scheduler_user or attempt.job.owner.slurm_user or ""
    return now if rows.update(submitting_at=now, scheduler_user=attempt.scheduler_user) == 1 else None


def under(claim: datetime) -> Q:
    """A row that is still ours to submit, not yet anybody's in the scheduler."""
    return Q(submitting_at=claim, scheduler_id="")


def _may_start(attempt: Attempt, claim: datetime, source: Scheduler) -> bool:
    """False while the scheduler still has an earlier attempt of this job alive or requeued (protocols.md §1)."""
    before = Attempt.objects.filter(job_id=attempt.job_id, number__lt=attempt.number).exclude(scheduler_id="")
    ids = sorted(set(before.values_list("scheduler_id", flat=True)))
    # UNKNOWN is as good as alive: nothing is started beside what the scheduler cannot tell of just now.
    if ids and any(status.state not in ENDED and is_of(attempt, status) for status in source.status(ids).values()):
        rows = Attempt.objects.filter(under(claim), pk=attempt.pk)
        again = timezone.now() - RETRY + WAIT  # not at once: others are due, too
        rows.update(submitting_at=again, reason="Waits until the attempt before it has ended.")
        return False
    return True


def _taken(attempt: Attempt, scheduler_id: str, source: Scheduler) -> None:
    """Write its id down, under whoever's claim: the row follows one job, and any other of this key is cancelled."""
    rows = Attempt.objects.filter(pk=attempt.pk, scheduler_id="", ended_at=None)
    if rows.update(scheduler_id=scheduler_id, submitted_at=timezone.now(), reason="") != 1:
        if not Attempt.objects.filter(pk=attempt.pk, scheduler_id=scheduler_id).exists():
            strays.found(attempt, scheduler_id, source)
        return
    attempt.scheduler_id = scheduler_id
    logger.info("attempt %s: submitted as %s", attempt.pk, scheduler_id)
    tokens.leave(attempt)
    live.announce(attempt.pk)


def not_taken(attempt: Attempt, claim: datetime, error: SchedulerError, *, sweep: Sweep | None = None) -> None:
    """Refused: the attempt has failed. Not reached: it stays due, and the page says why."""
    if error.permanent:
        end_unsubmitted(attempt, claim, Ended("failed"), cause="rejected", reason=str(error), sweep=sweep)
        return
    logger.warning("attempt %s: not submitted, tried again: %s", attempt.pk, error)
    Attempt.objects.filter(under(claim), pk=attempt.pk).update(reason=f"Not submitted yet: {error}")
    live.announce(attempt.pk)


def end_unsubmitted(
    attempt: Attempt, claim: datetime, ended: Ended, *, reason: str = "", cause: str = "", sweep: Sweep | None = None
) -> bool:
    """It ends without a job in the scheduler, unless an earlier request is still on its way there; whether by us.

    `sweep`: whose array it was to be in.
    """
    with transaction.atomic():
        is_over = end(attempt, ended, cause=cause, reason=reason, only=under(claim))
        if is_over and attempt.submitting_at is not None:
            strays.feared(attempt, sweep=sweep)
    return is_over
