"""Compute goodput: the fraction of a job's allocated time in which it made progress that still counts.

useful    the time of each step of rank 0 (`step_seconds`: waiting for data included, but no validation, save or
          start-up), each step once: as the newest incarnation did it. A step beyond the start of a later incarnation
          was done in vain, even if nobody has repeated it yet; so were steps after the newest checkpoint of a job that
          ended before it was complete.
wall      from the start to the end (or now) of every attempt; waiting in the queue is not counted.

For very long jobs whole stretches of steps are added, so where work was lost it is exact to within one stretch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from jobs import starting_steps
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Checkpoint
from portal.series import read

SERIES = "step_seconds"
MAX_STARTS = 1_000
EXACT = 64
"""Points are read individually until half as many full chunks exist (some 30,000 steps): pages ask often."""


@dataclass(frozen=True)
class Goodput:
    useful_seconds: float
    wall_seconds: float

    @property
    def fraction(self) -> float:
        return min(1.0, self.useful_seconds / self.wall_seconds)


def goodput(attempts: Sequence[Attempt], now: datetime) -> Goodput | None:
    """Return a job's goodput over all its attempts, oldest first; None if it reports no steps, or has not run yet."""
    spans = [
        ((attempt.ended_at or now) - attempt.started_at).total_seconds() for attempt in attempts if attempt.started_at
    ]
    wall = sum(span for span in spans if span > 0)
    owners = [owner_of(attempt.pk) for attempt in attempts]
    stretches, sources = read.stretches(owners, SERIES, points=EXACT)
    if not wall or not len(stretches.first):
        return None
    ids = [(owner[1], incarnation) for owner, incarnation in sources]
    limits = _limits(ids, starting_steps.steps(attempts, MAX_STARTS), attempts[-1])
    last_useful = np.array([limits[source] for source in stretches.source.tolist()])
    length = stretches.last - stretches.first + 1
    useful = np.clip((last_useful - stretches.first + 1) / length, 0.0, 1.0)
    return Goodput(float(np.sum(np.maximum(stretches.sum, 0.0) * useful)), wall)


def _limits(sources: Sequence[tuple[int, int]], starts: dict[tuple[int, int], int], latest: Attempt) -> list[float]:
    """Return the last step of each source whose work was not lost.

    Sources are (attempt, incarnation), oldest first.
    """
    limits, limit = [], _last_useful_step(latest)
    for source in reversed(sources):
        limits.append(limit)
        limit = min(limit, starts.get(source, math.inf))
    return limits[::-1]


def _last_useful_step(latest: Attempt) -> float:
    """Return the last step that counts: the newest checkpoint's if the job ended early, else any."""
    if latest.is_alive or latest.state == Attempt.State.COMPLETED:
        return math.inf
    saved = Checkpoint.objects.filter(attempt=latest).exclude(state=Checkpoint.State.CORRUPT)
    step = saved.order_by("-step").values_list("step", flat=True).first()
    if step is None:
        step = latest.resume_from.step if latest.resume_from else 0
    return float(step)
