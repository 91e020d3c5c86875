"""Compute how far an attempt is, and when it will be done."""

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from jobs.models import Attempt


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Steps done of steps requested; None if the trainer has not reported them (yet)."""

    step: int | None = None
    steps: int | None = None
    fraction: float | None = None
    eta_seconds: float | None = None


MAX_ESTIMATE_S = 10 * 366 * 86_400  # a trainer may report any number of steps; a longer estimate is not shown


def progress(attempt: Attempt | None, now: datetime | None = None) -> Progress:
    """Return the attempt's progress by its last report; needs no query (resume_from only if it is already loaded)."""
    if attempt is None or attempt.step is None:
        return Progress(steps=attempt.steps if attempt else None)
    step, steps = attempt.step, attempt.steps
    if not steps:
        return Progress(step=step, steps=steps)
    fraction = min(1.0, max(0.0, step / steps))
    eta = _eta_seconds(attempt, steps - step, now or timezone.now()) if attempt.state == "running" else None
    return Progress(step=step, steps=steps, fraction=round(fraction, 6), eta_seconds=eta)


def _eta_seconds(attempt: Attempt, left: int, now: datetime) -> float | None:
    """Return the time for the steps left at the recent pace, less what has passed since the newest report."""
    if attempt.pace_steps <= 0 or attempt.last_report_at is None:
        return None
    whole = left * attempt.pace_seconds / attempt.pace_steps
    since = max(0.0, (now - attempt.last_report_at).total_seconds())
    left_s = max(0.0, whole - since)
    return round(left_s, 1) if left_s <= MAX_ESTIMATE_S else None
