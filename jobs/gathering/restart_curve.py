"""Read the curves of a failed attempt and its successor, and the times at which steps were done."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.intake.reports import owner_of
from jobs.models import Attempt
from jobs.presenting.postmortems import restart_drawing
from portal.series import read, store
from portal.series.read import Curve

NAMES = ("loss", "train_loss", "training_loss")
POINTS = 400
CONTEXT_SHARE = 0.8  # share of the lost steps, shown before and after them
MIN_CONTEXT_STEPS = 60  # steps
STEP_WINDOW = 2_000  # steps searched for a value: some programs report every thousandth


@dataclass(frozen=True)
class TrainingSpan:
    """The times of an attempt's first and last step, as reported by rank 0."""

    first: datetime | None
    last: datetime | None


def progress_series(attempt: Attempt) -> str:
    """Return the series that shows the attempt's progress: the loss, else any other; "" if it reports none."""
    names = store.names([owner_of(attempt.pk)])
    return next((name for name in NAMES if name in names), names[0] if names else "")


def training_span(attempt: Attempt, name: str, first_step: int) -> TrainingSpan:
    """Return the times of the first step from `first_step` on, and of the last reported one."""
    if not name:
        return TrainingSpan(None, None)
    began = done_at(attempt, name, first_step)
    last = attempt.step if attempt.step is not None else first_step
    curve = read.curve([owner_of(attempt.pk)], name, start=max(0, last - STEP_WINDOW), end=last, points=None)
    return TrainingSpan(began, _time(curve, -1))


def done_at(attempt: Attempt, name: str, step: int) -> datetime | None:
    """Return when this step, or the first reported one after it, was done."""
    if not name or attempt.step is None or attempt.step < step:
        return None
    return _time(read.curve([owner_of(attempt.pk)], name, start=step, end=step + STEP_WINDOW, points=None), 0)


def _time(curve: Curve, place: int) -> datetime | None:
    return datetime.fromtimestamp(float(curve.time[place]), UTC) if len(curve.time) else None


def draw(before: Attempt, after: Attempt, name: str, resumed_step: int) -> restart_drawing.RestartCurve | None:
    """Draw both curves around the repeated steps; None if there is nothing to draw."""
    if not name or before.step is None:
        return None
    room = max(MIN_CONTEXT_STEPS, int(CONTEXT_SHARE * (before.step - resumed_step)))
    start, end = max(0, min(resumed_step, before.step) - room), before.step + room
    curves = [
        read.curve([owner_of(attempt.pk)], name, start=start, end=end, points=POINTS) for attempt in (before, after)
    ]
    parts = [(curve.step, curve.value if curve.value is not None else curve.mean) for curve in curves]
    (steps_before, values_before), (steps_after, values_after) = parts
    if values_before is None or values_after is None:
        return None
    return restart_drawing.draw(
        restart_drawing.RestartCurveInput(
            name=name,
            before=(steps_before, values_before),
            after=(steps_after, values_after),
            attempt_numbers=(before.number, after.number),
            resumed_step=resumed_step,
            end_step=before.step,
            is_exact=all(curve.value is not None for curve in curves),
            unit=after.job.job_kind.unit,
        )
    )
