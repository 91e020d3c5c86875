"""Give back allocations that outlive their job.

Under Slurm an elastic job may lose the node that runs its batch script. It continues on the others, but once its
launchers have ended nobody ends the allocation, which would occupy its nodes up to the time limit.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from functools import partial

from django.db.models.functions import Coalesce
from django.utils import timezone

from jobs.disk import folders
from jobs.following import ending
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.tick_context import TickContext, logger
from jobs.models import Attempt, Job
from jobs.models.attempt import AttemptQuerySet

QUIET_FOR = timedelta(seconds=60)  # batch.sh ends within a second of its launchers
BUDGET_S = 1.0  # per tick
MAX_PER_TICK = 20  # each costs an access to the shared file system


def give_back(tick: TickContext) -> None:
    """End attempts whose launchers wrote their result and have been silent since; others in each tick."""
    until = time.monotonic() + BUDGET_S
    for attempt in _silent(timezone.now() - QUIET_FOR).with_job().order_by("?")[:MAX_PER_TICK]:
        if time.monotonic() > until:
            return
        tick.run_isolated(partial(_end_allocation, tick, attempt), f"attempt {attempt.pk}")


def _silent(since: datetime) -> AttemptQuerySet:
    """Return running attempts without a recent report: the launcher of a live one reports every two seconds."""
    running = Attempt.objects.alive().filter(state=Attempt.State.RUNNING).exclude(scheduler_id="")
    reporting = running.annotate(reported_at=Coalesce("last_report_at", "started_at"))
    return reporting.filter(reported_at__lt=since).exclude(job__kind=Job.ATTACHED)


def _end_allocation(tick: TickContext, attempt: Attempt) -> None:
    age = folders.age_of_result(attempt)
    if age is None or age < QUIET_FOR.total_seconds():
        return
    ended = AttemptEnd.from_result(folders.result_of(attempt), cancelled=attempt.cancel_asked_at is not None)
    if ended.result is None:
        return
    tick.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
    with tick.lease.writing():
        if ending.end(attempt, ended):
            logger.info("attempt %s had ended, but not its allocation: cancelled it", attempt.pk)
