"""The loss of an attempt that ended and of the one that went on, and when steps were done, by their series."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.intake.reports import owner_of
from jobs.models import Attempt
from jobs.presenting import rejoin
from portal.series import read, store
from portal.series.read import Curve

NAMES = ("loss", "train_loss", "training_loss")
POINTS = 400
AROUND = 0.8  # of what was lost, shown before and after it
LEAST_AROUND = 60  # steps
A_STEP = 2_000  # steps within which one is looked for: some programs tell every thousandth


@dataclass(frozen=True)
class Moments:
    """When an attempt made its first step and its last, as its rank 0 told."""

    first: datetime | None
    last: datetime | None


def name_of(attempt: Attempt) -> str:
    """The series that stands for its progress: the loss, else whatever it tells; "" where it tells none."""
    names = store.names([owner_of(attempt.pk)])
    return next((name for name in NAMES if name in names), names[0] if names else "")


def moments(attempt: Attempt, name: str, first_step: int) -> Moments:
    """The first step from `first_step` on, and the last that it told of."""
    if not name:
        return Moments(None, None)
    began = done_at(attempt, name, first_step)
    last = attempt.step if attempt.step is not None else first_step
    curve = read.curve([owner_of(attempt.pk)], name, start=max(0, last - A_STEP), end=last, points=None)
    return Moments(began, _time(curve, -1))


def done_at(attempt: Attempt, name: str, step: int) -> datetime | None:
    """When it had done this step, or the first after it that it told of."""
    if not name or attempt.step is None or attempt.step < step:
        return None
    return _time(read.curve([owner_of(attempt.pk)], name, start=step, end=step + A_STEP, points=None), 0)


def _time(curve: Curve, place: int) -> datetime | None:
    return datetime.fromtimestamp(float(curve.time[place]), UTC) if len(curve.time) else None


def draw(before: Attempt, after: Attempt, name: str, kept_step: int) -> rejoin.Rejoin | None:
    """Both curves around the steps that were done twice; None where there is nothing to draw."""
    if not name or before.step is None:
        return None
    room = max(LEAST_AROUND, int(AROUND * (before.step - kept_step)))
    start, end = max(0, min(kept_step, before.step) - room), before.step + room
    curves = [read.curve([owner_of(one.pk)], name, start=start, end=end, points=POINTS) for one in (before, after)]
    parts = [(curve.step, curve.value if curve.value is not None else curve.mean) for curve in curves]
    (steps_before, values_before), (steps_after, values_after) = parts
    if values_before is None or values_after is None:
        return None
    return rejoin.draw(
        name,
        (steps_before, values_before),
        (steps_after, values_after),
        numbers=(before.number, after.number),
        resumed=kept_step,
        died=before.step,
        is_exact=all(curve.value is not None for curve in curves),
        counts=after.job.of_kind.counts,
    )
