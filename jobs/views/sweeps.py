"""A sweep's page: its jobs by their values, the best setting, and all losses in one drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from jobs.errors import JobError
from jobs.gathering.sweep_standing import compare_jobs
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Job, Sweep
from jobs.presenting.header import number
from jobs.presenting.sweep_standing import SweepStanding, metrics_of, value_text
from jobs.submitting import sweeps
from portal.access import can, user_of
from portal.series.read import curve
from vigil_core import formatting

MOST_ROWS = 200
MOST_LINES = 40
WIDTH, HEIGHT, POINTS = 1000.0, 200.0, 120


@dataclass
class SweepJobRow:
    """A job of the sweep, with its latest attempt loaded."""

    job: Job
    paths: list[str]
    metrics: list[str]
    is_best: bool = False

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
class Polyline:
    job: Job
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


@login_required
@require_safe
def page(request: HttpRequest, sweep_id: int) -> HttpResponse:
    """Show the whole page, or for htmx the part that changes."""
    user = user_of(request)
    sweep = get_object_or_404(Sweep.objects.visible_to(user).select_related("project", "owner"), pk=sweep_id)
    jobs = list(sweep.jobs.select_related("latest").defer("spec", "spec_toml", "notes").order_by("sweep_index"))
    paths, metrics = list(sweep.over), metrics_of(job.latest.latest for job in jobs if job.latest)
    rows = [SweepJobRow(job, paths, metrics) for job in jobs if job.latest is not None]
    over = sweep.is_over()
    measured = [(row.job.pk, row.job.name, row.job.sweep_values, row.attempt.latest) for row in rows]
    standing = compare_jobs(sweep, measured, is_over=over)
    best = standing.best_jobs if standing else set()
    for row in rows:
        row.is_best = row.job.pk in best
    unit = jobs[0].job_kind.unit if jobs else "step"
    sort = request.GET.get("sort", "")
    rows = _sorted(rows, sort, paths, metrics)
    of_states = sweep.counts()
    alive = sum(of_states.get(state, 0) for state in Attempt.ALIVE)
    context = {
        "section": "jobs",
        "sweep": sweep,
        "rows": rows if request.GET.get("all") else rows[:MOST_ROWS],
        "total": len(rows),
        "refused": [
            RefusedRow([value_text(values.get(path)) for path in paths], why)
            for values, why in sweep.refused[:MOST_ROWS]
        ],
        "columns": [
            _column(f"v{i}", path.removeprefix("run.").removeprefix("script."), sort) for i, path in enumerate(paths)
        ],
        "measured": [_column(f"m{i}", name.replace("_", " "), sort) for i, name in enumerate(metrics)],
        "fixed": {
            name: _column(name, title, sort)
            for name, title in (("job", "Job"), ("state", "State"), ("step", unit.capitalize()))
        },
        "is_by_mean": bool(standing and standing.settings),
        "counts": [(state, of_states[state]) for state in Attempt.State.values if state in of_states],
        "counted": f"{unit}s",
        "drawing": _drawing(rows),
        "over": over,
        "alive": alive,
        "may_change": can(user, "change", sweep),
        "headline": _summary(len(rows), of_states, standing, over=over, stopped=sweep.stopped_why),
        "without": _without_jobs(sweep),
    }
    is_part = request.headers.get("HX-Target") == "sweep"
    response = render(request, "jobs/_sweep.html" if is_part else "jobs/sweep.html", context)
    response.headers["Vary"] = "HX-Target, Cookie"
    return response


@login_required
@require_POST
def cancel(request: HttpRequest, sweep_id: int) -> HttpResponse:
    user = user_of(request)
    sweep = get_object_or_404(Sweep.objects.visible_to(user).select_related("project", "owner"), pk=sweep_id)
    try:
        done = sweeps.cancel(user, sweep)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(
            request, f"Cancelling {formatting.plural(done, 'job')}. The ranks save a last checkpoint and stop."
        )
    return redirect("sweep", sweep_id=sweep.pk)


def _without_jobs(sweep: Sweep) -> str:
    """Return how many combinations have no job, as a sentence; "" if all have one."""
    many = len(sweep.refused)
    return f"{formatting.plural(many, 'combination')} {'has' if many == 1 else 'have'} no job." if many else ""


def _sorted(rows: list[SweepJobRow], sort: str, paths: list[str], metrics: list[str]) -> list[SweepJobRow]:
    """Sort the rows as the address asks, by job, value, metric, state or step; missing values go last."""
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
    there = {row.job.pk for _, row in sortable}
    return [*(row for _, row in sortable), *(row for row in rows if row.job.pk not in there)]


def _order(value: Any) -> tuple[int, Any]:
    """Return a sort key: numbers before texts."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, value) if is_number else (1, value_text(value))


def _column(name: str, title: str, sort: str) -> dict[str, str]:
    direction = {name: "ascending", f"-{name}": "descending"}.get(sort, "")
    return {"title": title, "sort": f"-{name}" if direction == "ascending" else name, "direction": direction}


def _summary(
    many: int, counts: dict[str, int], standing: SweepStanding | None, *, over: bool, stopped: str
) -> tuple[str, str]:
    """Return the sweep's progress and what is ahead, or first of all that Vigil has stopped it."""
    if stopped:
        return "Stopped.", f"{stopped} Fix the problem and submit it again, or resume the jobs that should run anyway."
    ended = sum(count for state, count in counts.items() if state not in Attempt.ALIVE)
    bad = sum(count for state, count in counts.items() if state in Attempt.ENDED_BADLY)
    lead = (
        f"All {formatting.plural(many, 'job')} have ended."
        if over
        else f"{formatting.count(ended)} of {formatting.plural(many, 'job')} have ended."
    )
    rest = [f"{formatting.count(bad)} failed."] if bad else []
    rest += [standing.text] if standing and standing.text else []
    return lead, " ".join(rest)


def _drawing(rows: list[SweepJobRow]) -> LossDrawing | None:
    """Draw the losses of as many jobs as can be distinguished, the best on top."""
    reporting = [row for row in rows if number(row.attempt.latest, "loss") is not None]
    best = [row for row in reporting if row.is_best][:MOST_LINES]
    chosen = [row for row in reporting if not row.is_best][: MOST_LINES - len(best)] + best
    curves = [(row, *_points(row)) for row in chosen]
    curves = [entry for entry in curves if len(entry[1]) > 1]
    if not curves:
        return None
    values = np.concatenate([value for _, _, value in curves])
    low, high = float(values.min()), float(np.percentile(values, 98))
    first = min(float(step[0]) for _, step, _ in curves)
    last = max(float(step[-1]) for _, step, _ in curves)
    lines = []
    for row, step, value in curves:
        x = (step - first) / ((last - first) or 1.0) * WIDTH
        y = HEIGHT - 2 - np.clip((value - low) / ((high - low) or 1.0), 0, 1) * (HEIGHT - 4)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        lines.append(Polyline(row.job, points, row.is_best))
    return LossDrawing(lines, low, high, int(last), len(reporting) - len(chosen))


def _points(row: SweepJobRow) -> tuple[Any, Any]:
    attempts = Attempt.objects.filter(job=row.job).order_by("number").values_list("pk", flat=True)
    read = curve([owner_of(pk) for pk in attempts], "loss", points=POINTS)
    value = read.value if read.value is not None else read.mean
    if value is None:
        return [], []
    finite = np.isfinite(value)
    return read.step[finite].astype(float), value[finite]
