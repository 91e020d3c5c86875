"""Read what the page of a sweep shows: its jobs by their values, the best setting, and all losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.gathering.sweep_standing import compare_jobs
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Job, Sweep
from jobs.presenting.metric_values import number
from jobs.presenting.sweep_page import LossCurve, LossDrawing, SweepProgress, draw_losses, headline, refused_text
from jobs.presenting.sweep_standing import metrics_of, value_text
from portal.series.read import curve

MAX_ROWS = 200
MAX_LINES = 40
POINTS = 120


@dataclass(frozen=True)
class SweepJobRow:
    """A job of the sweep, with its latest attempt loaded."""

    job: Job
    paths: list[str]
    metrics: list[str]
    is_best: bool

    @property
    def attempt(self) -> Attempt:
        assert self.job.latest is not None
        return self.job.latest

    @property
    def values(self) -> list[str]:
        return [value_text((self.job.sweep_values or {}).get(path)) for path in self.paths]

    @property
    def numbers(self) -> list[float | None]:
        return [number(self.attempt.latest, name) for name in self.metrics]


@dataclass(frozen=True)
class RefusedRow:
    """A combination without a job: its values in the order of the columns, and why."""

    values: list[str]
    why: str


@dataclass(frozen=True)
class SweepColumn:
    """A column by which the table can be sorted. `sort` is the address's parameter for a click on it."""

    title: str
    sort: str
    direction: str
    """ascending or descending; "" if the table is sorted by another column."""


@dataclass(frozen=True, kw_only=True)
class SweepPage:
    """Everything that the page of a sweep shows. `rows` are the rows that are shown, of `total`."""

    rows: list[SweepJobRow]
    total: int
    refused: list[RefusedRow]
    refused_text: str
    job_column: SweepColumn
    state_column: SweepColumn
    step_column: SweepColumn
    value_columns: list[SweepColumn]
    metric_columns: list[SweepColumn]
    is_by_mean: bool
    """Whether settings are compared by their mean over seeds."""
    counts: list[tuple[str, int]]
    """The number of jobs in each state that any is in."""
    units: str
    drawing: LossDrawing | None
    is_over: bool
    headline: tuple[str, str]


def sweep_page(sweep: Sweep, sort: str, *, show_all: bool) -> SweepPage:
    """Return what the page shows, sorted as its address asks: by job, state, step, a value (v0) or a metric (m0)."""
    jobs = list(sweep.jobs.select_related("latest").defer("spec", "spec_toml", "notes").order_by("sweep_index"))
    started = [job for job in jobs if job.latest is not None]
    paths, metrics = list(sweep.over), metrics_of(job.latest.latest for job in started if job.latest)
    is_over = sweep.is_over()
    measured = [(job.pk, job.name, job.sweep_values, job.latest.latest) for job in started if job.latest]
    standing = compare_jobs(sweep, measured, is_over=is_over)
    best = standing.best_jobs if standing else set()
    rows = _sorted([SweepJobRow(job, paths, metrics, job.pk in best) for job in started], sort, paths, metrics)
    counts = sweep.counts()
    unit = jobs[0].job_kind.unit if jobs else "step"
    titles = [path.removeprefix("run.").removeprefix("script.") for path in paths]
    return SweepPage(
        rows=rows if show_all else rows[:MAX_ROWS],
        total=len(rows),
        refused=[
            RefusedRow([value_text(values.get(path)) for path in paths], why)
            for values, why in sweep.refused[:MAX_ROWS]
        ],
        refused_text=refused_text(sweep.refused),
        job_column=_column("job", "Job", sort),
        state_column=_column("state", "State", sort),
        step_column=_column("step", unit.capitalize(), sort),
        value_columns=[_column(f"v{index}", title, sort) for index, title in enumerate(titles)],
        metric_columns=[_column(f"m{index}", name.replace("_", " "), sort) for index, name in enumerate(metrics)],
        is_by_mean=bool(standing and standing.settings),
        counts=[(state, counts[state]) for state in Attempt.State.values if state in counts],
        units=f"{unit}s",
        drawing=_drawing(rows),
        is_over=is_over,
        headline=headline(_progress(len(rows), counts, is_over=is_over), standing, stopped=sweep.stopped_why),
    )


def _progress(total: int, counts: dict[str, int], *, is_over: bool) -> SweepProgress:
    ended = sum(count for state, count in counts.items() if state not in Attempt.ALIVE)
    failed = sum(count for state, count in counts.items() if state in Attempt.ENDED_BADLY)
    return SweepProgress(jobs=total, ended=ended, failed=failed, is_over=is_over)


def _sorted(rows: list[SweepJobRow], sort: str, paths: Sequence[str], metrics: Sequence[str]) -> list[SweepJobRow]:
    """Sort the rows; those without a value go last."""
    name = sort.removeprefix("-")
    keys: dict[str, Callable[[SweepJobRow], Any]] = {
        "job": lambda row: row.job.sweep_index,
        "state": lambda row: row.attempt.state,
        "step": lambda row: row.attempt.step,
    }
    keys |= {f"v{i}": lambda row, p=path: _order((row.job.sweep_values or {}).get(p)) for i, path in enumerate(paths)}  # type: ignore[misc]
    keys |= {f"m{i}": lambda row, m=metric: number(row.attempt.latest, m) for i, metric in enumerate(metrics)}  # type: ignore[misc]
    if name not in keys:
        return rows
    sortable = [(key, row) for row in rows if (key := keys[name](row)) is not None and key == key]
    sortable.sort(key=lambda pair: pair[0], reverse=sort.startswith("-"))
    with_value = {row.job.pk for _, row in sortable}
    return [*(row for _, row in sortable), *(row for row in rows if row.job.pk not in with_value)]


def _order(value: Any) -> tuple[int, Any]:
    """Return a sort key: numbers before texts."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, value) if is_number else (1, value_text(value))


def _column(name: str, title: str, sort: str) -> SweepColumn:
    direction = {name: "ascending", f"-{name}": "descending"}.get(sort, "")
    return SweepColumn(title, f"-{name}" if direction == "ascending" else name, direction)


def _drawing(rows: Sequence[SweepJobRow]) -> LossDrawing | None:
    """Draw the losses of as many jobs as can be distinguished, the best on top."""
    reporting = [row for row in rows if number(row.attempt.latest, "loss") is not None]
    best = [row for row in reporting if row.is_best][:MAX_LINES]
    chosen = [row for row in reporting if not row.is_best][: MAX_LINES - len(best)] + best
    attempts = Attempt.objects.filter(job__in=[row.job.pk for row in chosen]).order_by("job", "number")
    attempts_by_job: defaultdict[int, list[int]] = defaultdict(list)
    for job_id, pk in attempts.values_list("job_id", "pk"):
        attempts_by_job[job_id].append(pk)
    curves = [_curve(row, attempts_by_job[row.job.pk]) for row in chosen]
    return draw_losses(curves, left_out=len(reporting) - len(chosen))


def _curve(row: SweepJobRow, attempts: Sequence[int]) -> LossCurve:
    read = curve([owner_of(pk) for pk in attempts], "loss", points=POINTS)
    losses = read.value if read.value is not None else read.mean
    steps = read.step.astype(float)
    if losses is None:
        steps = losses = np.array([])
    finite = np.isfinite(losses)
    return LossCurve(job=row.job.pk, name=row.job.name, steps=steps[finite], losses=losses[finite], is_best=row.is_best)
