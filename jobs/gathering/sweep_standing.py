"""Read what the jobs of a sweep have measured, and compare them, for its page and REST."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jobs.models import Sweep
from jobs.presenting.metric_values import number
from jobs.presenting.sweep_standing import JobValue, SweepStanding, compare, metrics_of

Measured = tuple[int, str, dict[str, Any] | None, dict[str, Any]]
"""A job's id, name, values in the sweep, and the latest value of each series."""


def measured_by(sweep: Sweep) -> list[Measured]:
    """Return what each job has measured, without making models: a sweep may have 1,000 and be polled every second."""
    rows = sweep.jobs.exclude(latest=None).order_by("sweep_index")
    return list(rows.values_list("pk", "name", "sweep_values", "latest__latest"))


def compare_jobs(sweep: Sweep, measured: Iterable[Measured], *, is_over: bool) -> SweepStanding | None:
    """Return how the sweep's jobs compare; None while nothing is measured."""
    rows = list(measured)
    metrics = metrics_of(latest for *_, latest in rows)
    if not metrics:
        return None
    values = [JobValue(pk, name, values or {}, number(latest, metrics[0])) for pk, name, values, latest in rows]
    return compare(metrics[0], sweep.over, values, is_over=is_over)
