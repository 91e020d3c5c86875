"""Hand the first attempts of a sweep's jobs to the scheduler as one array, once.

    1. write the run directories, as many a tick as there is time for: `Sweep.prepared` says how far that is
    2. claim all rows by one conditional update
    3. a claim that somebody made before and never finished: look for the sweep's key first
    4. ask the scheduler, write down the ids
Only the follower does this, under its lease. As with single attempts (handover) an unknown outcome leaves the
claims, and after RETRY the next tick begins at 3. What comes later of a job, a restart, is a submission of its own.
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
from jobs.following import handover, strays
from jobs.following.cause import Ended
from jobs.following.handover import PASSING, RETRY
from jobs.models import Attempt, Predecessor, Sweep
from jobs.models.attempt import AttemptQuerySet
from nodes.schedulers.base import Scheduler, SchedulerError

logger = logging.getLogger(__name__)

AT_ONCE = 200  # run directories a tick


def due() -> list[int]:
    """Sweeps with first attempts that no scheduler has yet, or whose submission did not come to an end."""
    waiting = Predecessor.objects.filter(met=False).values("job")
    rows = _due(timezone.now()).exclude(job__in=waiting)
    return list(rows.order_by("job__sweep").values_list("job__sweep", flat=True).distinct())


def hand_over(sweep_id: int, scheduler: Scheduler, *, until: float) -> None:
    """Go on with one sweep; `until`: when the time for it is over (monotonic). Again after a crash is no harm."""
    sweep = Sweep.objects.select_related("project", "owner").filter(pk=sweep_id).first()
    if sweep is None:
        return
    try:
        if not _prepare(sweep, until):
            return  # the next tick goes on
    except (JobError, OSError) as error:
        claim, rows = _claim(sweep)
        _not_taken(sweep, rows, claim, _as_refusal(error))
        return
    claim, rows = _claim(sweep)
    try:
        _ask(sweep, rows, claim, scheduler, until)
    except SchedulerError as error:
        _not_taken(sweep, rows, claim, error)
    except OSError as error:
        _not_taken(sweep, rows, claim, _as_refusal(error))


def _due(now: datetime) -> AttemptQuerySet:
    """First attempts to hand over. One that was cancelled before anybody asked for it needs no scheduler."""
    first = Attempt.objects.filter(job__sweep__isnull=False, number=1, scheduler_id="", ended_at=None)
    return first.filter(Q(submitting_at=None, cancel_asked_at=None) | Q(submitting_at__lt=now - RETRY))


def _prepare(sweep: Sweep, until: float) -> bool:
    """Write run directories; whether all are there. At least one, however little time is left."""
    rows = Attempt.objects.filter(job__sweep=sweep, number=1, scheduler_id="", ended_at=None)
    rows = rows.select_related("job__project", "job__owner", "job__sweep", "resume_from").order_by("job__sweep_index")
    for attempt in rows.filter(job__sweep_index__gte=sweep.prepared)[:AT_ONCE]:
        attempt.scheduler_user = attempt.scheduler_user or sweep.owner.slurm_user or ""
        prepare(attempt)
        sweep.prepared = (attempt.job.sweep_index or 0) + 1
        Sweep.objects.filter(pk=sweep.pk).update(prepared=sweep.prepared)
        if time.monotonic() > until:
            break
    return not rows.filter(job__sweep_index__gte=sweep.prepared).exists()


def _claim(sweep: Sweep) -> tuple[datetime, list[Attempt]]:
    """Ours to submit since this moment. The rows keep the earlier claim's: whether they were asked for before."""
    now = timezone.now()
    rows = _due(now).filter(job__sweep=sweep)
    found = list(rows.select_related("job__project", "job__owner", "job__sweep").order_by("job__sweep_index"))
    user = next((one.scheduler_user for one in found if one.scheduler_user), sweep.owner.slurm_user or "")
    rows.update(submitting_at=now, scheduler_user=user)
    ours = set(Attempt.objects.filter(job__sweep=sweep, submitting_at=now).values_list("pk", flat=True))
    claimed = [one for one in found if one.pk in ours]
    for one in claimed:
        one.scheduler_user = user
    return now, claimed


def _ask(sweep: Sweep, rows: list[Attempt], claim: datetime, scheduler: Scheduler, until: float) -> None:
    before = [attempt for attempt in rows if attempt.submitting_at is not None]
    known = scheduler.find(sweep.key, user=before[0].scheduler_user) if before else None
    if known is not None:
        _taken(sweep, before, [f"{known}_{one.job.sweep_index}" for one in before], scheduler, until)
        others = [attempt.pk for attempt in rows if attempt.submitting_at is None]
        Attempt.objects.filter(handover.under(claim), pk__in=others).update(submitting_at=None)  # the next tick's
        return
    for attempt in (one for one in rows if one.cancel_asked_at is not None):
        handover.end_unsubmitted(attempt, claim, Ended("cancelled", cancelled=True), sweep=sweep)
    rows = [attempt for attempt in rows if attempt.cancel_asked_at is None]
    if not rows:
        return
    handover.check_owner(sweep.owner)
    asked = array_submission(sweep, rows)
    if Attempt.objects.filter(handover.under(claim), job__sweep=sweep, ended_at=None).count() < len(rows):
        return  # writing took so long that somebody else is at it, or was
    indices = [attempt.job.sweep_index or 0 for attempt in rows]
    _taken(sweep, rows, scheduler.submit_array(asked, indices, at_once=sweep.at_once), scheduler, until)


def _taken(sweep: Sweep, rows: list[Attempt], ids: list[str], scheduler: Scheduler, until: float) -> None:
    """Write their ids down, under whoever's claim, all or none. Tokens that there is no time for a tick leaves."""
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
            strays.found(attempt, scheduler_id, scheduler, sweep=sweep)
    was_late = {attempt.pk for attempt, _ in late}
    for attempt in rows:
        if time.monotonic() > until:
            return
        if attempt.pk not in was_late:
            tokens.leave(attempt)
            live.announce(attempt.pk)


def _not_taken(sweep: Sweep, rows: list[Attempt], claim: datetime, error: SchedulerError) -> None:
    for attempt in rows:
        handover.not_taken(attempt, claim, error, sweep=sweep)


def _as_refusal(error: JobError | OSError) -> SchedulerError:
    """Tells an error as a refusal: of a project's environment that somebody has spoilt, say, or a full file system."""
    if isinstance(error, OSError):
        return SchedulerError(missing.text_of(error), permanent=error.errno not in PASSING)
    return SchedulerError(str(error), permanent=True)
