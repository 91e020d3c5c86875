"""Describe how far a sweep is, and draw the losses of its jobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jobs.presenting.sweep_standing import SweepStanding
from portal.drawing import polyline
from vigil_core import formatting

WIDTH, HEIGHT = 1000.0, 200.0
TOP_PERCENTILE = 98  # losses above it are cut off, so that a first step does not flatten all that follow


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """The losses of one job over steps, all finite."""

    job: int
    name: str
    steps: NDArray[np.float64]
    losses: NDArray[np.float64]
    is_best: bool


@dataclass(frozen=True)
class Polyline:
    """A job's losses as the template draws them."""

    job: int
    name: str
    points: str
    is_best: bool


@dataclass(frozen=True)
class LossDrawing:
    """The losses over steps; `low` and `high` are the ends of the axis."""

    lines: list[Polyline]
    low: float
    high: float
    last_step: int
    left_out: int


def draw_losses(curves: Sequence[LossCurve], *, left_out: int) -> LossDrawing | None:
    """Draw these curves, the last ones on top; None if none has two points. `left_out`: jobs that are not drawn."""
    curves = [curve for curve in curves if len(curve.steps) > 1]
    if not curves:
        return None
    losses = np.concatenate([curve.losses for curve in curves])
    low, high = float(losses.min()), float(np.percentile(losses, TOP_PERCENTILE))
    first = min(float(curve.steps[0]) for curve in curves)
    last = max(float(curve.steps[-1]) for curve in curves)
    lines = []
    for curve in curves:
        x, y = (curve.steps - first) / ((last - first) or 1.0), (curve.losses - low) / ((high - low) or 1.0)
        points = polyline(x, y, WIDTH, HEIGHT, margin=2)
        lines.append(Polyline(curve.job, curve.name, points, curve.is_best))
    return LossDrawing(lines, low, high, int(last), left_out)


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Counts of a sweep's jobs: all, those that have ended, and those of them that failed."""

    jobs: int
    ended: int
    failed: int
    is_over: bool


def headline(progress: SweepProgress, standing: SweepStanding | None, *, stopped: str) -> tuple[str, str]:
    """Return the sweep's progress and what is ahead, or first of all why Vigil has stopped it."""
    if stopped:
        return "Stopped.", f"{stopped} Fix the problem and submit it again, or resume the jobs that should run anyway."
    jobs = formatting.plural(progress.jobs, "job")
    lead = f"All {jobs}" if progress.is_over else f"{formatting.count(progress.ended)} of {jobs}"
    rest = [f"{formatting.count(progress.failed)} failed."] if progress.failed else []
    rest += [standing.text] if standing and standing.text else []
    return f"{lead} have ended.", " ".join(rest)


def refused_text(refused: Sequence[tuple[Mapping[str, object], str]]) -> str:
    """Return how many combinations have no job, as a sentence; "" if all have one."""
    count = len(refused)
    return f"{formatting.plural(count, 'combination')} {'has' if count == 1 else 'have'} no job." if count else ""
