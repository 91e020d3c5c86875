"""Advance cancellations, a step a tick: requested → signalled → killed.

A requested kill skips the signal and the wait for a last checkpoint.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from functools import partial

from django.db.models import Q
from django.utils import timezone

from jobs.disk import folders, rundir
from jobs.disk.prepare import grace_of
from jobs.following.tick_context import TickContext, logger
from jobs.models import Attempt, Job
from jobs.models.attempt import AttemptQuerySet
from jobs.spec import STOP_SECONDS

LAUNCHER_WAIT = timedelta(seconds=15)  # beyond the grace: the launcher kills and reports in good order first
KILL_RETRY_AFTER = timedelta(seconds=10)
BUDGET_S = 2.0  # per tick: a scheduler whose calls all time out must not delay the rest of the tick
MAX_PER_TICK = 200


def advance(tick: TickContext) -> None:
    """Take each cancellation that is due one step further within the budget; in random order, so that none starves."""
    until = time.monotonic() + BUDGET_S
    for attempt in _due(timezone.now()).with_job().order_by("?")[:MAX_PER_TICK]:
        if time.monotonic() > until:
            return
        tick.run_isolated(partial(_advance, tick, attempt), f"attempt {attempt.pk}")


def _due(now: datetime) -> AttemptQuerySet:
    """Return the cancelled attempts that may need a step: most only wait for their launcher or for Slurm."""
    waits = Q(state=Attempt.State.PENDING) | Q(job__kind=Job.ATTACHED)
    shortest = now - timedelta(seconds=STOP_SECONDS) - LAUNCHER_WAIT
    due = (
        Q(waits, cancel_killed_at=None)
        | Q(kill_requested_at__isnull=False, cancel_killed_at=None)
        | Q(~waits, cancel_signalled_at=None, cancel_killed_at=None)
        | Q(~waits, cancel_killed_at=None, cancel_signalled_at__lt=shortest)
        | Q(cancel_killed_at__lt=now - KILL_RETRY_AFTER)
    )
    return Attempt.objects.alive().confirmed().exclude(scheduler_id="").exclude(cancel_asked_at=None).filter(due)


def _advance(tick: TickContext, attempt: Attempt) -> None:
    now = timezone.now()
    if attempt.cancel_killed_at is not None:
        if now - attempt.cancel_killed_at > KILL_RETRY_AFTER:
            _kill(tick, attempt, now)
    elif (
        attempt.state == Attempt.State.PENDING or attempt.job.is_attached
    ):  # nothing there handles USR1, so end it as scancel does
        _kill(tick, attempt, now)
    elif attempt.kill_requested_at is not None:
        _write_cancelled_file(attempt, now)
        _kill(tick, attempt, now)
    elif attempt.cancel_signalled_at is None:
        _write_cancelled_file(attempt, now)
        # Not TERM: Slurm gives that to the srun in the script as well, which then kills its tasks at once.
        tick.scheduler.signal(attempt.scheduler_id, "USR1", user=attempt.scheduler_user)
        tick.note(attempt, cancel_signalled_at=now)
    elif now - attempt.cancel_signalled_at > timedelta(seconds=grace_of(attempt)) + LAUNCHER_WAIT:
        _kill(tick, attempt, now)


def _write_cancelled_file(attempt: Attempt, now: datetime) -> None:
    """Write the file that keeps batch.sh from requesting a requeue and gives the launcher the reason to stop.

    A full or unreachable disk must not keep a job running: if it is requeued because of that, it is killed.
    """
    root = folders.root_of(attempt)
    if root is None:
        return
    try:
        rundir.write(root / "portal" / "cancelled", now.isoformat())
    except OSError as error:
        logger.warning("attempt %s: the cancellation cannot be written to its run directory: %s", attempt.pk, error)


def _kill(tick: TickContext, attempt: Attempt, now: datetime) -> None:
    tick.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
    tick.note(attempt, cancel_killed_at=now)
