"""Release held jobs: somebody requests it, the next tick calls the scheduler and stores its answer."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

from django.utils import timezone

from jobs.following.tick_context import TickContext, logger
from jobs.models import Attempt
from nodes.schedulers.base import SchedulerError

GIVE_UP = timedelta(minutes=10)  # nobody expects a job to start because of a request an hour ago
BUDGET_S = 1.0  # per tick
MAX_PER_TICK = 50


def advance(tick: TickContext) -> None:
    """Release the jobs for which somebody has requested it, within a tick's budget."""
    until = time.monotonic() + BUDGET_S
    due = Attempt.objects.alive().confirmed().exclude(release_requested_at=None).exclude(scheduler_id="")
    for attempt in due.select_related("release_requested_by").order_by("release_requested_at")[:MAX_PER_TICK]:
        if time.monotonic() > until:
            return
        tick.run_isolated(partial(_release, tick, attempt), f"attempt {attempt.pk}")


def _release(tick: TickContext, attempt: Attempt) -> None:
    if attempt.state != Attempt.State.PENDING:
        tick.note(attempt, release_requested_at=None, release_outcome="")
        return
    by = attempt.release_requested_by
    # Only an administrator may release an administrator's hold: for a sysadmin Vigil calls Slurm in its own name.
    user = "" if by is not None and by.is_sysadmin else attempt.scheduler_user
    assert attempt.release_requested_at is not None
    try:
        tick.scheduler.release(attempt.scheduler_id, user=user)
    except SchedulerError as error:
        is_over = error.permanent or timezone.now() - attempt.release_requested_at > GIVE_UP
        left = {"release_requested_at": None} if is_over else {}
        tick.note(attempt, release_outcome=f"Not released: {error}", **left)
        return
    logger.info("attempt %s: released", attempt.pk)
    tick.note(attempt, release_requested_at=None, release_outcome="")
