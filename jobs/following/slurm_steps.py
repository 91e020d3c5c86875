"""Read how an attempt's Slurm steps ended from accounting after its end, alongside the launcher's result."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.utils import timezone

from jobs import live
from jobs.following.ending import CANCELLED_OUTSIDE
from jobs.following.tick_context import TickContext
from jobs.models import Attempt
from nodes.schedulers.base import ENDED, SchedulerError, SlurmStep
from vigil_core import untrusted

ACCOUNTING_DELAY = timedelta(minutes=2)  # for accounting, which is updated later than slurmctld
LOOK_BACK = timedelta(days=1)
PAUSE_S = 15.0  # after accounting did not answer: each such call may take as long as a whole tick
MAX_PER_TICK = 10  # per tick
BUDGET_S = 1.0
MAX_STEPS = 40  # stored: a script may call srun in a loop


_silent_until = 0.0


def fetch(tick: TickContext) -> None:
    """Fetch the steps of attempts that have just ended, and store them once all steps have ended."""
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    until = time.monotonic() + BUDGET_S
    ended = Attempt.objects.filter(ended_at__gt=timezone.now() - LOOK_BACK, slurm_steps_at=None)
    for attempt in ended.exclude(scheduler_id="").order_by("?")[:MAX_PER_TICK]:
        if time.monotonic() > until:
            return
        try:
            reported_steps = tick.scheduler.steps(attempt.scheduler_id, attempt.scheduler_restart_count)
        except SchedulerError:
            _silent_until = time.monotonic() + PAUSE_S
            raise
        _store(tick, attempt, reported_steps)


def _store(tick: TickContext, attempt: Attempt, steps: tuple[SlurmStep, ...]) -> None:
    assert attempt.ended_at is not None
    now = timezone.now()
    is_whole = bool(steps) and all(step.state in ENDED for step in steps)
    if not is_whole and now - attempt.ended_at < ACCOUNTING_DELAY:
        return
    canceller = _canceller(tick, attempt)
    with tick.lease.writing():
        Attempt.objects.filter(pk=attempt.pk).update(slurm_steps=as_rows(steps), slurm_steps_at=now)
        if canceller:
            reason = f"Cancelled by Slurm user {canceller}, outside Vigil."
            Attempt.objects.filter(pk=attempt.pk, reason=CANCELLED_OUTSIDE).update(reason=reason)
        if steps or canceller:
            live.announce(attempt.pk)


def _canceller(tick: TickContext, attempt: Attempt) -> str:
    """Return the Slurm user who cancelled it outside Vigil; "" if nobody did, or accounting does not know."""
    if attempt.reason != CANCELLED_OUTSIDE:
        return ""
    who = tick.scheduler.cancelled_by(attempt.scheduler_id, attempt.scheduler_restart_count)
    return untrusted.name(who, 255)


def as_rows(found: Iterable[SlurmStep]) -> list[dict[str, Any]]:
    """Return Slurm's steps as rows store them: of too many, those that failed before the others."""
    steps = list(found)
    if len(steps) > MAX_STEPS:
        steps = sorted(steps, key=lambda step: step.state == "completed")[:MAX_STEPS]
        steps.sort(key=lambda step: step.started_at or 0.0)
    return [{**asdict(step), "nodes": list(step.nodes)} for step in steps]
