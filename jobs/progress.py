"""How far an attempt is, and when it will be done."""

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from jobs.models import Attempt


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Steps done of steps asked for; None where the trainer has not said (yet)."""

    step: int | None = None
    steps: int | None = None
    fraction: float | None = None
    eta_seconds: float | None = None


def progress(attempt: Attempt | None, now: datetime | None = None) -> Progress:
    """The attempt's progress by its last report; needs no query (resume_from only if it is already loaded)."""
    if attempt is None or attempt.step is None:
        return Progress(steps=attempt.steps if attempt else None)
    step, steps = attempt.step, attempt.steps
    if not steps:
        return Progress(step=step, steps=steps)
    fraction = min(1.0, max(0.0, step / steps))
    eta = _eta_seconds(attempt, steps - step, now or timezone.now()) if attempt.state == "running" else None
    return Progress(step=step, steps=steps, fraction=round(fraction, 6), eta_seconds=eta)


def _eta_seconds(attempt: Attempt, left: int, now: datetime) -> float | None:
    """Steps left at the newest reported pace, less what has passed since that report."""
    pace = attempt.latest.get("step_seconds") if isinstance(attempt.latest, dict) else None
    if not isinstance(pace, int | float) or not 0 < pace < 1e9:
        return None
    since = (now - attempt.last_report_at).total_seconds() if attempt.last_report_at else 0.0
    return round(max(0.0, left * pace - min(max(since, 0.0), pace * left)), 1)
