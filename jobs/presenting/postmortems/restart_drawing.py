"""Draw a curve across a restart: the lost part and its repetition on top of each other. Coordinates in per cent.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portal.drawing import polyline
from vigil_core import formatting

LABEL_WIDTH = 5.0  # per cent of the width for the labels of values
WIDTH, HEIGHT = 1000.0, 120.0
TOP = 4.0  # of the drawing, above the curves
TICKS = 5

Steps = NDArray[np.int64]
Values = NDArray[np.float64]
Part = tuple[Steps, Values]


@dataclass(frozen=True, kw_only=True)
class RestartCurveInput:
    """The steps and values of a series in two attempts, before a restart and after it.

    With `is_exact`, values are those of single steps, so that repeated steps can be compared. `unit` is the job's unit
    of progress.
    """

    name: str
    before: Part
    after: Part
    attempt_numbers: tuple[int, int]
    resumed_step: int
    end_step: int
    """The last step of the attempt before."""
    is_exact: bool
    unit: str = "step"


@dataclass(frozen=True)
class AttemptLine:
    """The part of the curve that one attempt produced."""

    title: str
    points: str
    is_lost: bool


@dataclass(frozen=True)
class RestartCurve:
    """Everything that the template draws. `left` is the x at which the curves begin."""

    name: str
    lines: list[AttemptLine]
    steps: list[tuple[float, str]]
    values: list[tuple[float, str]]
    resumed_x: float | None
    end_x: float | None
    words: str
    left: float = LABEL_WIDTH
    width: float = 100.0 - LABEL_WIDTH


def draw(curve: RestartCurveInput) -> RestartCurve | None:
    """Draw both attempts' curves; return None if there is nothing to draw."""
    parts = [_finite(*curve.before), _finite(*curve.after)]
    steps, values = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    if len(steps) < 2 or steps.min() == steps.max():
        return None
    first, last = int(steps.min()), int(steps.max())
    low, high = (float(value) for value in np.percentile(values, (1, 99)))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    room = 0.1 * (high - low)
    low, high = low - room, high + room

    def x_of(step: int) -> float:
        return round(LABEL_WIDTH + (100 - LABEL_WIDTH) * (step - first) / (last - first), 3)

    lines = [
        AttemptLine(f"attempt {number}", _points(part, (first, last), (low, high)), number == curve.attempt_numbers[0])
        for number, part in zip(curve.attempt_numbers, parts, strict=True)
        if len(part[0])
    ]
    comparison = _comparison_text(parts[0], parts[1], f"{curve.unit}s") if curve.is_exact else ""
    return RestartCurve(
        name=curve.name,
        lines=lines,
        steps=[(x_of(step), formatting.count(step)) for step in _round(first, last)],
        values=[
            (round(TOP + HEIGHT * (high - at) / (high - low), 2), formatting.loss(at))
            for at in (low + room, high - room)
        ],
        resumed_x=x_of(curve.resumed_step) if first < curve.resumed_step < last else None,
        end_x=x_of(curve.end_step) if first < curve.end_step < last else None,
        words=_words(curve) + comparison,
    )


def _finite(step: Steps, value: Values) -> Part:
    good = np.isfinite(value)
    return step[good], value[good]


def _points(part: Part, steps: tuple[int, int], values: tuple[float, float]) -> str:
    x, y = (part[0] - steps[0]) / (steps[1] - steps[0]), (part[1] - values[0]) / (values[1] - values[0])
    return polyline(x, y, WIDTH, HEIGHT)


def _round(first: int, last: int) -> list[int]:
    """Return at most TICKS + 1 round steps within the range."""
    size = max(1, (last - first) // TICKS)
    power = 10 ** (len(str(size)) - 1)
    every = next(power * n for n in (1, 2, 5, 10) if power * n >= size)
    start = -(-first // every) * every
    return [step for step in range(start, last + 1, every) if first <= step <= last][: TICKS + 1]


def _words(curve: RestartCurveInput) -> str:
    title = f"{curve.name[:1].upper()}{curve.name[1:]}"
    first, second = curve.attempt_numbers
    return (
        f"{title} of attempt {first} until {curve.unit} {formatting.count(curve.end_step)}, and of attempt {second}"
        f" from {curve.unit} {formatting.count(curve.resumed_step)} on."
    )


def _comparison_text(before: Part, after: Part, units: str) -> str:
    """Return a sentence on whether repeated steps gave the same values, and by how much they differ if not."""
    common, here, there = np.intersect1d(before[0], after[0], return_indices=True)
    if len(common) < 2:
        return ""
    difference = float(np.max(np.abs(before[1][here] - after[1][there])))
    if difference == 0:
        return f" The {units} that were repeated have identical values."
    return f" The {units} that were repeated differ by at most {formatting.measure(difference)}."
