"""Jobs that the scheduler got of an attempt that does not want them: cancelled until the scheduler confirms.

A worker that slept may submit what has ended meanwhile. And where the answer to a submission was lost, looking for its
key once proves little: the request may still be on its way. So a row stays here, and each tick goes on with it.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db.models import Q
from django.utils import timezone

from jobs.following.tick import TickContext
from jobs.models import Attempt, Stray, Sweep
from nodes.schedulers.base import ENDED, JobStatus, Scheduler, SchedulerError

logger = logging.getLogger(__name__)

CANCEL_AGAIN = timedelta(seconds=10)
LOOK_AGAIN = timedelta(seconds=15)  # looking for a key makes Slurm list all jobs of its user
LOOK_FOR = timedelta(minutes=10)
BUDGET_S = 1.0  # a tick


def found(attempt: Attempt, scheduler_id: str, scheduler: Scheduler, *, sweep: Sweep | None = None) -> None:
    """The scheduler has this job, too late: written down first, then cancelled at once if that can be.

    `sweep`: in whose array it is.
    """
    given = {"attempt": attempt, "scheduler_user": attempt.scheduler_user}
    stray, _ = Stray.objects.get_or_create(**_called(attempt, sweep), scheduler_id=scheduler_id, defaults=given)
    logger.warning("attempt %s: %s came too late and is cancelled", attempt.pk, scheduler_id)
    try:
        _cancel(stray, scheduler)
    except SchedulerError as error:
        logger.warning("%s: not cancelled yet: %s", stray, error)


def feared(attempt: Attempt, *, sweep: Sweep | None = None) -> None:
    """The attempt has ended, and nobody knows what became of a request to submit it: look out for it."""
    given = {"attempt": attempt, "scheduler_user": attempt.scheduler_user, "tried_at": timezone.now()}
    Stray.objects.get_or_create(**_called(attempt, sweep), scheduler_id="", defaults=given)


def _called(attempt: Attempt, sweep: Sweep | None) -> dict[str, Any]:
    """What the scheduler has it under."""
    return {"key": attempt.key} if sweep is None else {"key": sweep.key, "task": attempt.job.sweep_index}


def pursue(tick: TickContext) -> None:
    """Go on with each that is due, the longest untried first, as far as the budget reaches."""
    until, now = time.monotonic() + BUDGET_S, timezone.now()
    due = Q(tried_at=None) | Q(scheduler_id="", tried_at__lt=now - LOOK_AGAIN) | ~Q(scheduler_id="")
    rows = list(Stray.objects.filter(due).order_by("tried_at", "id")[:100])
    if not rows:
        return
    ids = sorted({stray.scheduler_id for stray in rows if stray.scheduler_id})
    told = tick.scheduler.status(ids) if ids else {}
    for stray in rows:
        if time.monotonic() > until:
            return
        if stray.scheduler_id:
            status = told.get(stray.scheduler_id)
            tick.live_through(partial(_end, stray, status, tick.scheduler, now), str(stray))
        else:
            tick.live_through(partial(_look, stray, tick.scheduler, now), str(stray))


def _end(stray: Stray, status: JobStatus | None, scheduler: Scheduler, now: datetime) -> None:
    is_another = status is not None and bool(status.keys) and stray.key not in status.keys
    if is_another or (stray.tried_at is not None and (status is None or status.state in ENDED)):
        logger.info("%s is gone", stray)
        stray.delete()
    elif stray.tried_at is None or now - stray.tried_at > CANCEL_AGAIN:
        _cancel(stray, scheduler)


def _look(stray: Stray, scheduler: Scheduler, now: datetime) -> None:
    """Look for its key, for as long as a request may take to arrive; of several, each may turn up."""
    task = stray.task if stray.task >= 0 else None
    scheduler_id = scheduler.find(stray.key, user=stray.scheduler_user, task=task)
    if now - stray.since > LOOK_FOR:
        stray.delete()
    else:
        Stray.objects.filter(pk=stray.pk).update(tried_at=now)
    if scheduler_id is None:
        return
    given = {"attempt_id": stray.attempt_id, "scheduler_user": stray.scheduler_user}
    called = {"key": stray.key, "task": stray.task, "scheduler_id": scheduler_id}
    turned_up, is_new = Stray.objects.get_or_create(**called, defaults=given)
    if is_new:
        logger.warning("%s has turned up and is cancelled", turned_up)
        _cancel(turned_up, scheduler)


def _cancel(stray: Stray, scheduler: Scheduler) -> None:
    try:
        scheduler.cancel(stray.scheduler_id, user=stray.scheduler_user)
    except SchedulerError as error:
        if not error.permanent:  # "there is no such job" is as good as done
            raise
    Stray.objects.filter(pk=stray.pk).update(tried_at=timezone.now())
