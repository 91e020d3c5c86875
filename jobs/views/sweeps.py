"""A sweep's page: its jobs by their values, the best of them, and all their losses in one drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from jobs.errors import JobError
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Job, Sweep
from jobs.presenting.header import number
from jobs.submitting import sweeps
from portal import formatting
from portal.access import can, user_of
from portal.series.read import curve

MOST_ROWS = 200
MOST_LINES = 40
MOST_METRICS = 4
WIDTH, HEIGHT, POINTS = 1000.0, 200.0, 120
# What is told first, and whether less of it is better; of others (a script's own) less is.
FIRST = ("validation_loss", "loss", "validation_accuracy", "accuracy")
MORE_IS_BETTER = ("accuracy", "score", "auc", "reward", "f1")
SPREADS = ("client_loss_", "client_accuracy_")  # of a federation
LEFT_OUT = frozenset(
    {
        "learning_rate", "tokens_per_second", "samples_per_second", "step_seconds", "data_seconds", "memory_gib",
        "gradient_norm", "round_seconds", "compute_seconds", "wait_seconds", "transfer_seconds", "mib_up", "mib_down",
        "trained", "late", "dropped", "rejected",
    }
)  # fmt: skip


@dataclass
class Row:
    """A job of the sweep. It comes with its latest attempt."""

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
        return [_said((self.job.sweep_values or {}).get(path)) for path in self.paths]

    @property
    def numbers(self) -> list[float | None]:
        return [number(self.attempt.latest, name) for name in self.metrics]


@dataclass(frozen=True)
class Polyline:
    job: Job
    points: str
    is_best: bool


@dataclass(frozen=True)
class Drawing:
    """The losses over steps; `low` and `high` are the ends of its axis."""

    lines: list[Polyline]
    low: float
    high: float
    last_step: int
    left_out: int


@login_required
@require_safe
def page(request: HttpRequest, sweep_id: int) -> HttpResponse:
    """The whole page, or for htmx what changes of it."""
    user = user_of(request)
    sweep = get_object_or_404(Sweep.objects.visible_to(user).select_related("project", "owner"), pk=sweep_id)
    jobs = list(sweep.jobs.select_related("latest").defer("spec", "spec_toml", "notes").order_by("sweep_index"))
    paths, metrics = list(sweep.over), metrics_of(job.latest.latest for job in jobs if job.latest)
    rows = [Row(job, paths, metrics) for job in jobs if job.latest is not None]
    best = _best(rows, metrics[0]) if metrics and not _is_of_seeds(paths) else None
    if best is not None:
        best.is_best = True
    seeds = _over_seeds(rows, metrics[0]) if metrics and _is_of_seeds(paths) else ""
    counts = jobs[0].of_kind.counts if jobs else "step"
    sort = request.GET.get("sort", "")
    rows = _sorted(rows, sort, paths, metrics)
    of_states = sweep.counts()
    alive = sum(of_states.get(state, 0) for state in Attempt.ALIVE)
    over = sweep.is_over()
    context = {
        "section": "jobs",
        "sweep": sweep,
        "rows": rows if request.GET.get("all") else rows[:MOST_ROWS],
        "total": len(rows),
        "columns": [
            _column(f"v{i}", path.removeprefix("run.").removeprefix("script."), sort) for i, path in enumerate(paths)
        ],
        "measured": [_column(f"m{i}", name.replace("_", " "), sort) for i, name in enumerate(metrics)],
        "fixed": {
            name: _column(name, title, sort)
            for name, title in (("job", "Job"), ("state", "State"), ("step", counts.capitalize()))
        },
        "best": best,
        "metric": metrics[0].replace("_", " ") if metrics else "",
        "counts": [(state, of_states[state]) for state in Attempt.State.values if state in of_states],
        "counted": f"{counts}s",
        "drawing": _drawing(rows, best),
        "over": over,
        "alive": alive,
        "may_change": can(user, "change", sweep),
        "say": _say(len(rows), of_states, best, metrics, over=over, stopped=sweep.stopped_why, seeds=seeds),
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


def metrics_of(latest: Iterable[dict[str, Any]]) -> list[str]:
    """What the jobs measure, the telling ones first."""
    found = {name for values in latest for name in values if not name.startswith(SPREADS)} - LEFT_OUT
    return [*(name for name in FIRST if name in found), *sorted(found - {*FIRST})][:MOST_METRICS]


def _is_of_seeds(paths: list[str]) -> bool:
    """Whether its jobs are one set-up with several seeds: none of them is better than another."""
    return bool(paths) and all(path.rpartition(".")[2] == "seed" for path in paths)


def _over_seeds(rows: list[Row], metric: str) -> str:
    """Return how far apart the seeds of one set-up are: "accuracy 0.950 to 0.970 over 5 seeds"."""
    known = [value for row in rows if (value := number(row.attempt.latest, metric)) is not None]
    told = [value for value in known if math.isfinite(value)]
    if len(told) < 2:
        return ""
    seeds = formatting.plural(len(told), "seed")
    return f"No difference but chance: {metric.replace('_', ' ')} {min(told):.3f} to {max(told):.3f} over {seeds}."


def _best(rows: list[Row], metric: str) -> Row | None:
    """The job that leads by its newest value; none while nothing is told."""
    told = [
        (value, row)
        for row in rows
        if (value := number(row.attempt.latest, metric)) is not None and math.isfinite(value)
    ]
    sign = -1.0 if _more_is_better(metric) else 1.0
    return min(told, key=lambda pair: sign * pair[0])[1] if told else None


def _more_is_better(metric: str) -> bool:
    return any(word in metric for word in MORE_IS_BETTER)


def _sorted(rows: list[Row], sort: str, paths: list[str], metrics: list[str]) -> list[Row]:
    """Sorts the rows as the address asks: by job, value, metric, state or step; what is not there goes last."""
    name = sort.removeprefix("-")
    keys: dict[str, Callable[[Row], Any]] = {
        "job": lambda row: row.job.sweep_index,
        "state": lambda row: row.attempt.state,
        "step": lambda row: row.attempt.step,
    }
    keys |= {f"v{i}": lambda row, p=path: _order((row.job.sweep_values or {}).get(p)) for i, path in enumerate(paths)}  # type: ignore[misc]
    keys |= {f"m{i}": lambda row, m=metric: number(row.attempt.latest, m) for i, metric in enumerate(metrics)}  # type: ignore[misc]
    if name not in keys:
        return rows
    known = [(key, row) for row in rows if (key := keys[name](row)) is not None and key == key]
    known.sort(key=lambda pair: pair[0], reverse=sort.startswith("-"))
    there = {row.job.pk for _, row in known}
    return [*(row for _, row in known), *(row for row in rows if row.job.pk not in there)]


def _order(value: Any) -> tuple[int, Any]:
    """Numbers before texts."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return (0, value) if is_number else (1, _said(value))


def _column(name: str, title: str, sort: str) -> dict[str, str]:
    direction = {name: "ascending", f"-{name}": "descending"}.get(sort, "")
    return {"title": title, "sort": f"-{name}" if direction == "ascending" else name, "direction": direction}


def _said(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _say(
    many: int,
    counts: dict[str, int],
    best: Row | None,
    metrics: list[str],
    *,
    over: bool,
    stopped: str,
    seeds: str = "",
) -> tuple[str, str]:
    """Says how far the sweep is, and which of its jobs is ahead; before all, that Vigil has stopped it."""
    if stopped:
        return "Stopped.", f"{stopped} Mend it and submit it again, or resume the jobs that shall run all the same."
    ended = sum(count for state, count in counts.items() if state not in Attempt.ALIVE)
    bad = sum(count for state, count in counts.items() if state in Attempt.ENDED_BADLY)
    lead = (
        f"All {formatting.plural(many, 'job')} have ended."
        if over
        else f"{formatting.count(ended)} of {formatting.plural(many, 'job')} have ended."
    )
    rest = [f"{formatting.count(bad)} ended badly."] if bad else []
    rest += [seeds] if seeds else []
    if best is not None:
        with_it = ", ".join(
            f"{path.rpartition('.')[2]} {value}" for path, value in zip(best.paths, best.values, strict=True)
        )
        value, what = number(best.attempt.latest, metrics[0]), metrics[0].replace("_", " ")
        leads = f"{'Best' if over else 'Ahead'} by the {'highest' if _more_is_better(metrics[0]) else 'lowest'} {what}"
        rest.append(f"{leads}: {best.job.name} with {with_it}, {value:.3f}.")
    return lead, " ".join(rest)


def _drawing(rows: list[Row], best: Row | None) -> Drawing | None:
    """The losses of as many as an eye can tell apart, the best one among them on top."""
    told = [row for row in rows if number(row.attempt.latest, "loss") is not None]
    chosen = [row for row in told if row is not best][: MOST_LINES - 1] + ([best] if best in told else [])
    curves = [(row, *_points(row)) for row in chosen if row is not None]
    curves = [one for one in curves if len(one[1]) > 1]
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
        lines.append(Polyline(row.job, points, row is best))
    return Drawing(lines, low, high, int(last), len(told) - len(chosen))


def _points(row: Row) -> tuple[Any, Any]:
    attempts = Attempt.objects.filter(job=row.job).order_by("number").values_list("pk", flat=True)
    read = curve([owner_of(pk) for pk in attempts], "loss", points=POINTS)
    value = read.value if read.value is not None else read.mean
    if value is None:
        return [], []
    finite = np.isfinite(value)
    return read.step[finite].astype(float), value[finite]
