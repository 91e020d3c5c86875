"""What Slurm's accounts say of an attempt's steps after its end: which `srun` ended how, beside the launcher's word."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from django.utils import timezone

from jobs import live
from jobs.following.ending import CANCELLED_OUTSIDE
from jobs.following.tick import TickContext
from jobs.models import Attempt
from nodes.schedulers.base import ENDED, SchedulerError, SlurmStep
from vigil_core import untrusted

WAIT = timedelta(minutes=2)  # for the accounts, which hear of things later than slurmctld
LOOK_BACK = timedelta(days=1)
PAUSE_S = 15.0  # after accounts that did not answer: each such call may take as long as a whole tick
AT_ONCE = 10  # a tick
BUDGET_S = 1.0
MOST = 40  # steps kept: a script may call srun in a loop


_silent_until = 0.0


def ask(tick: TickContext) -> None:
    """Ask for those of attempts that have just ended, and keep them once all have."""
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    until = time.monotonic() + BUDGET_S
    ended = Attempt.objects.filter(ended_at__gt=timezone.now() - LOOK_BACK, slurm_steps_at=None)
    for attempt in ended.exclude(scheduler_id="").order_by("?")[:AT_ONCE]:
        if time.monotonic() > until:
            return
        try:
            told = tick.scheduler.steps(attempt.scheduler_id, attempt.scheduler_restart_count)
        except SchedulerError:
            _silent_until = time.monotonic() + PAUSE_S
            raise
        _keep(tick, attempt, told)


def _keep(tick: TickContext, attempt: Attempt, told: tuple[SlurmStep, ...]) -> None:
    assert attempt.ended_at is not None
    now = timezone.now()
    is_whole = bool(told) and all(step.state in ENDED for step in told)
    if not is_whole and now - attempt.ended_at < WAIT:
        return
    canceller = _canceller(tick, attempt)
    with tick.held.writing():
        Attempt.objects.filter(pk=attempt.pk).update(slurm_steps=kept(told), slurm_steps_at=now)
        if canceller:
            reason = f"Cancelled by Slurm user {canceller}, outside Vigil."
            Attempt.objects.filter(pk=attempt.pk, reason=CANCELLED_OUTSIDE).update(reason=reason)
        if told or canceller:
            live.announce(attempt.pk)


def _canceller(tick: TickContext, attempt: Attempt) -> str:
    """Return the Slurm user who cancelled it past Vigil; "" where nobody did, or the accounts do not tell."""
    if attempt.reason != CANCELLED_OUTSIDE:
        return ""
    who = tick.scheduler.cancelled_by(attempt.scheduler_id, attempt.scheduler_restart_count)
    return untrusted.name(who, 255)


def kept(told: Iterable[SlurmStep]) -> list[dict[str, Any]]:
    """Slurm's steps as rows keep them: where there are too many, those that went wrong before the others."""
    steps = list(told)
    if len(steps) > MOST:
        steps = sorted(steps, key=lambda step: step.state == "completed")[:MOST]
        steps.sort(key=lambda step: step.started_at or 0.0)
    return [{**asdict(step), "nodes": list(step.nodes)} for step in steps]
