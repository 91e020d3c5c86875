"""Outline long curves: stretches of points with their min, max and sum, and joining stretches into fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from portal.series.codec import Floats, Integers, Points, bounded


@dataclass(frozen=True)
class Outline:
    """Stretches in rising order of their first step. min and max are NaN if nothing is finite."""

    first: Integers
    last: Integers
    time: Floats  # of the first point
    n: Integers
    finite: Integers  # how many values are finite; `sum` is over them
    min: Floats
    max: Floats
    sum: Floats
    source: Integers  # of the first point

    def mean(self) -> Floats:
        with np.errstate(invalid="ignore"):  # 0 / 0: nothing finite
            return self.sum / self.finite


def of_rows(rows: NDArray[np.void], source: Integers) -> Outline:
    """Return an outline with one stretch per chunk."""
    return Outline(
        first=rows["first_step"],
        last=rows["last_step"],
        time=rows["first_time"],
        n=rows["n"],
        finite=rows["n"] - rows["odd"],
        min=rows["min"],
        max=rows["max"],
        sum=rows["sum"],
        source=source,
    )


def of_points(points: Points, source: Integers) -> Outline:
    """Return an outline with one stretch per point."""
    finite = np.isfinite(points.value)
    value = np.where(finite, points.value, np.nan)
    return Outline(
        first=points.step,
        last=points.step,
        time=points.time,
        n=np.ones(len(points), np.int64),
        finite=finite.astype(np.int64),
        min=value,
        max=value,
        sum=np.where(finite, points.value, 0.0),
        source=source,
    )


def concatenate(pieces: Sequence[Outline]) -> Outline:
    """Return all stretches, in order of their first step."""
    order = np.argsort(np.concatenate([piece.first for piece in pieces]), kind="stable")
    return Outline(
        *(np.concatenate([getattr(p, name) for p in pieces])[order] for name in Outline.__dataclass_fields__)
    )


def thin(outline: Outline, stretches: int) -> Outline:
    """Join neighbours into at most `stretches` stretches of about equal numbers of points."""
    if len(outline.first) <= stretches:
        return outline
    through = np.cumsum(outline.n)
    bucket = (through - outline.n) * stretches // through[-1]
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    ends = np.append(starts[1:], len(bucket)) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.reduceat(outline.sum, starts)
    return Outline(
        first=outline.first[starts],
        last=np.maximum.reduceat(outline.last, starts),
        time=outline.time[starts],
        n=through[ends] - through[starts] + outline.n[starts],
        finite=np.add.reduceat(outline.finite, starts),
        min=np.fmin.reduceat(outline.min, starts),
        max=np.fmax.reduceat(outline.max, starts),
        sum=bounded(total),
        source=outline.source[starts],
    )
