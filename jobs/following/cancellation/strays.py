"""Cancel jobs that reached the scheduler after their attempt had ended, until the scheduler confirms it.

A worker that slept may submit an attempt that ended meanwhile. And where the answer to a submission was lost, searching
for its key once proves little: the request may still be on its way. So a row stays here, and each tick works on it.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.db.models import Q
from django.utils import timezone

from jobs.following.tick_context import TickContext
from jobs.models import Attempt, Stray, Sweep
from nodes.schedulers.base import ENDED, JobStatus, Scheduler, SchedulerError

logger = logging.getLogger(__name__)

CANCEL_AGAIN_AFTER = timedelta(seconds=10)
SEARCH_AGAIN_AFTER = timedelta(seconds=15)  # searching for a key makes Slurm list all jobs of its user
SEARCH_FOR = timedelta(minutes=10)
BUDGET_S = 1.0  # per tick


def cancel_late_submission(
    attempt: Attempt, scheduler_id: str, scheduler: Scheduler, *, sweep: Sweep | None = None
) -> None:
    """Cancel a job that reached the scheduler too late: store it first, then cancel it at once if that is possible.

    `sweep`: in whose array it is.
    """
    defaults = {"attempt": attempt, "scheduler_user": attempt.scheduler_user}
    stray, _ = Stray.objects.get_or_create(**_key_of(attempt, sweep), scheduler_id=scheduler_id, defaults=defaults)
    logger.warning("attempt %s: %s was submitted too late and is cancelled", attempt.pk, scheduler_id)
    try:
        _cancel(stray, scheduler)
    except SchedulerError as error:
        logger.warning("%s: not cancelled yet: %s", stray, error)


def watch_for(attempt: Attempt, *, sweep: Sweep | None = None) -> None:
    """Search the scheduler for an ended attempt's job, as the outcome of a request to submit it is unknown."""
    defaults = {"attempt": attempt, "scheduler_user": attempt.scheduler_user, "tried_at": timezone.now()}
    Stray.objects.get_or_create(**_key_of(attempt, sweep), scheduler_id="", defaults=defaults)


def _key_of(attempt: Attempt, sweep: Sweep | None) -> dict[str, Any]:
    """Return the key, and the index within an array, that the scheduler has the job under."""
    return {"key": attempt.key} if sweep is None else {"key": sweep.key, "task": attempt.job.sweep_index}


def cancel_due(tick: TickContext) -> None:
    """Search for and cancel the submissions that are due, the longest untried first, within the budget."""
    until, now = time.monotonic() + BUDGET_S, timezone.now()
    due = Q(tried_at=None) | Q(scheduler_id="", tried_at__lt=now - SEARCH_AGAIN_AFTER) | ~Q(scheduler_id="")
    rows = list(Stray.objects.filter(due).order_by("tried_at", "id")[:100])
    if not rows:
        return
    ids = sorted({stray.scheduler_id for stray in rows if stray.scheduler_id})
    statuses = tick.scheduler.status(ids) if ids else {}
    for stray in rows:
        if time.monotonic() > until:
            return
        if stray.scheduler_id:
            status = statuses.get(stray.scheduler_id)
            tick.run_isolated(partial(_end, stray, status, tick.scheduler, now), str(stray))
        else:
            tick.run_isolated(partial(_search, stray, tick.scheduler, now), str(stray))


def _end(stray: Stray, status: JobStatus | None, scheduler: Scheduler, now: datetime) -> None:
    is_another = status is not None and bool(status.keys) and stray.key not in status.keys
    if is_another or (stray.tried_at is not None and (status is None or status.state in ENDED)):
        logger.info("%s is gone", stray)
        stray.delete()
    elif stray.tried_at is None or now - stray.tried_at > CANCEL_AGAIN_AFTER:
        _cancel(stray, scheduler)


def _search(stray: Stray, scheduler: Scheduler, now: datetime) -> None:
    """Search for its key for as long as a request may take to arrive; of several requests each may arrive."""
    task = stray.task if stray.task >= 0 else None
    scheduler_id = scheduler.find(stray.key, user=stray.scheduler_user, task=task)
    if now - stray.since > SEARCH_FOR:
        stray.delete()
    else:
        Stray.objects.filter(pk=stray.pk).update(tried_at=now)
    if scheduler_id is None:
        return
    defaults = {"attempt_id": stray.attempt_id, "scheduler_user": stray.scheduler_user}
    key = {"key": stray.key, "task": stray.task, "scheduler_id": scheduler_id}
    found, is_new = Stray.objects.get_or_create(**key, defaults=defaults)
    if is_new:
        logger.warning("%s has appeared and is cancelled", found)
        _cancel(found, scheduler)


def _cancel(stray: Stray, scheduler: Scheduler) -> None:
    try:
        scheduler.cancel(stray.scheduler_id, user=stray.scheduler_user)
    except SchedulerError as error:
        if not error.permanent:  # "there is no such job": nothing left to cancel
            raise
    Stray.objects.filter(pk=stray.pk).update(tried_at=timezone.now())
