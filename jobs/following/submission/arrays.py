"""Hand the first attempts of a sweep's jobs to the scheduler as one array, once.

    1. write the run directories, as many a tick as there is time for: `Sweep.prepared` stores the progress
    2. claim all rows by one conditional update
    3. where an earlier claim was never finished: search the scheduler for the sweep's key first
    4. submit the array, store its ids
Only the follower does this, under its lease. As with single attempts (handover) an unknown outcome leaves the
claims, and after RETRY_AFTER the next tick begins at 3. A job's later restart is a submission of its own.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from jobs import live
from jobs.disk import missing, tokens
from jobs.disk.prepare import array_submission, prepare
from jobs.errors import JobError
from jobs.following.cancellation import strays
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.submission import handover
from jobs.following.submission.handover import RETRY_AFTER, TRANSIENT_ERRNOS
from jobs.models import Attempt, Predecessor, Sweep
from jobs.models.attempt import AttemptQuerySet
from nodes.schedulers.base import Scheduler, SchedulerError

logger = logging.getLogger(__name__)

MAX_PER_TICK = 200  # run directories per tick


def due() -> list[int]:
    """Return the sweeps with first attempts to submit, or whose submission was not finished."""
    waiting = Predecessor.objects.filter(met=False).values("job")
    rows = _due(timezone.now()).exclude(job__in=waiting)
    return list(rows.order_by("job__sweep").values_list("job__sweep", flat=True).distinct())


def hand_over(sweep_id: int, scheduler: Scheduler, *, until: float) -> None:
    """Continue with one sweep until a moment (monotonic seconds). Safe to repeat after a crash."""
    sweep = Sweep.objects.select_related("project", "owner").filter(pk=sweep_id).first()
    if sweep is None:
        return
    try:
        if not _prepare(sweep, until):
            return  # the next tick continues
    except (JobError, OSError) as error:
        claim, rows = _claim(sweep)
        _record_failure(sweep, rows, claim, _as_scheduler_error(error))
        return
    claim, rows = _claim(sweep)
    try:
        _submit(sweep, rows, claim, scheduler, until)
    except SchedulerError as error:
        _record_failure(sweep, rows, claim, error)
    except OSError as error:
        _record_failure(sweep, rows, claim, _as_scheduler_error(error))


def _due(now: datetime) -> AttemptQuerySet:
    """Return first attempts to hand over. One that was cancelled before it was submitted needs no scheduler."""
    first = Attempt.objects.filter(job__sweep__isnull=False, number=1, scheduler_id="", ended_at=None)
    return first.filter(Q(submitting_at=None, cancel_asked_at=None) | Q(submitting_at__lt=now - RETRY_AFTER))


def _prepare(sweep: Sweep, until: float) -> bool:
    """Write run directories, at least one however little time is left. Return whether all exist."""
    rows = Attempt.objects.filter(job__sweep=sweep, number=1, scheduler_id="", ended_at=None)
    rows = rows.select_related("job__project", "job__owner", "job__sweep", "resume_from").order_by("job__sweep_index")
    for attempt in rows.filter(job__sweep_index__gte=sweep.prepared)[:MAX_PER_TICK]:
        attempt.scheduler_user = attempt.scheduler_user or sweep.owner.slurm_user or ""
        prepare(attempt)
        sweep.prepared = (attempt.job.sweep_index or 0) + 1
        Sweep.objects.filter(pk=sweep.pk).update(prepared=sweep.prepared)
        if time.monotonic() > until:
            break
    return not rows.filter(job__sweep_index__gte=sweep.prepared).exists()


def _claim(sweep: Sweep) -> tuple[datetime, list[Attempt]]:
    """Claim the sweep's due attempts. Return the moment of the claim and the attempts.

    The returned attempts keep `submitting_at` of an earlier claim, which shows whether they were submitted before.
    """
    now = timezone.now()
    rows = _due(now).filter(job__sweep=sweep)
    attempts = list(rows.select_related("job__project", "job__owner", "job__sweep").order_by("job__sweep_index"))
    users = (attempt.scheduler_user for attempt in attempts if attempt.scheduler_user)
    user = next(users, sweep.owner.slurm_user or "")
    rows.update(submitting_at=now, scheduler_user=user)
    ours = set(Attempt.objects.filter(job__sweep=sweep, submitting_at=now).values_list("pk", flat=True))
    claimed = [attempt for attempt in attempts if attempt.pk in ours]
    for attempt in claimed:
        attempt.scheduler_user = user
    return now, claimed


def _submit(sweep: Sweep, rows: list[Attempt], claim: datetime, scheduler: Scheduler, until: float) -> None:
    before = [attempt for attempt in rows if attempt.submitting_at is not None]
    existing_id = scheduler.find(sweep.key, user=before[0].scheduler_user) if before else None
    if existing_id is not None:
        _record_submissions(
            sweep, before, [f"{existing_id}_{attempt.job.sweep_index}" for attempt in before], scheduler, until
        )
        others = [attempt.pk for attempt in rows if attempt.submitting_at is None]
        Attempt.objects.filter(handover.claimed_at(claim), pk__in=others).update(submitting_at=None)  # the next tick's
        return
    for attempt in (attempt for attempt in rows if attempt.cancel_asked_at is not None):
        handover.end_unsubmitted(attempt, claim, AttemptEnd("cancelled", cancelled=True), sweep=sweep)
    rows = [attempt for attempt in rows if attempt.cancel_asked_at is None]
    if not rows:
        return
    handover.check_owner(sweep.owner)
    handover.avoid_unhealthy_nodes(rows, claim)
    array = array_submission(sweep, rows)
    if Attempt.objects.filter(handover.claimed_at(claim), job__sweep=sweep, ended_at=None).count() < len(rows):
        return  # writing took so long that another process has claimed them since
    indices = [attempt.job.sweep_index or 0 for attempt in rows]
    _record_submissions(sweep, rows, scheduler.submit_array(array, indices, at_once=sweep.at_once), scheduler, until)


def _record_submissions(sweep: Sweep, rows: list[Attempt], ids: list[str], scheduler: Scheduler, until: float) -> None:
    """Store the attempts' scheduler ids in one transaction, whoever has the claim, and write their tokens.

    If time runs out, a later tick writes the remaining tokens.
    """
    late = []
    with transaction.atomic():
        for attempt, scheduler_id in zip(rows, ids, strict=True):
            row = Attempt.objects.filter(pk=attempt.pk, scheduler_id="", ended_at=None)
            if row.update(scheduler_id=scheduler_id, submitted_at=timezone.now(), reason="") != 1:
                late.append((attempt, scheduler_id))
            attempt.scheduler_id = scheduler_id
    logger.info("sweep %s: %s jobs submitted as an array, from %s", sweep.pk, len(rows), ids[0])
    for attempt, scheduler_id in late:
        if not Attempt.objects.filter(pk=attempt.pk, scheduler_id=scheduler_id).exists():
            strays.cancel_late_submission(attempt, scheduler_id, scheduler, sweep=sweep)
    was_late = {attempt.pk for attempt, _ in late}
    for attempt in rows:
        if time.monotonic() > until:
            return
        if attempt.pk not in was_late:
            tokens.leave(attempt)
            live.announce(attempt.pk)


def _record_failure(sweep: Sweep, rows: list[Attempt], claim: datetime, error: SchedulerError) -> None:
    for attempt in rows:
        handover.record_failure(attempt, claim, error, sweep=sweep)


def _as_scheduler_error(error: JobError | OSError) -> SchedulerError:
    """Return the error as a scheduler's refusal, such as a damaged project environment or a full file system."""
    if isinstance(error, OSError):
        return SchedulerError(missing.text_of(error), permanent=error.errno not in TRANSIENT_ERRNOS)
    return SchedulerError(str(error), permanent=True)
