"""Read what the jobs of a sweep have measured, and compare them: for its page and REST alike."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.models import Job, Sweep
from jobs.presenting.header import number
from jobs.presenting.sweep_standing import JobValue, Standing, compare, metrics_of


def standing_of(sweep: Sweep, jobs: Sequence[Job], *, is_over: bool) -> Standing | None:
    """Return how the sweep's jobs compare, which come with their latest attempts; None while nothing is measured."""
    begun = [(job, job.latest) for job in jobs if job.latest is not None]
    metrics = metrics_of(latest.latest for _, latest in begun)
    if not metrics:
        return None
    values = [
        JobValue(job.pk, job.name, job.sweep_values or {}, number(latest.latest, metrics[0])) for job, latest in begun
    ]
    return compare(metrics[0], sweep.over, values, is_over=is_over)


def jobs_of(sweep: Sweep) -> list[Job]:
    """Return its jobs in order, with what `standing_of` needs of them and no more."""
    fields = ("name", "sweep_values", "latest__latest")
    return list(sweep.jobs.select_related("latest").only(*fields).order_by("sweep_index"))
