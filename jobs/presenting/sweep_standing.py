"""Compare the jobs of a sweep, or the mean of each setting over its seeds if the sweep varies the seed. Pure.

Two seeds of one setting differ by chance, so a single seed's winner says nothing about its setting. A setting is
called best only if its mean differs from the next one's by more than the seeds do: Student's t of the difference, with
the variance pooled over all settings, as a sweep has many settings and few seeds of each.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vigil_core import formatting

MAX_METRICS = 4
MIN_SEEDS = 2
# The metrics shown first, and those for which more is better; for all others less is better.
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
# The 97.5 % quantile of Student's t by degrees of freedom; in between, the lower one's.
T_QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 20: 2.09, 30: 2.04}


@dataclass(frozen=True, slots=True)
class JobValue:
    """A job of a sweep: its values by path, and the newest value of the metric; None if there is none yet."""

    job: int
    name: str
    values: Mapping[str, Any]
    value: float | None

    @property
    def is_measured(self) -> bool:
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True, slots=True)
class SweepSetting:
    """The jobs that differ only in the seed. `values` are the other varied values."""

    values: dict[str, Any]
    jobs: tuple[JobValue, ...]

    @property
    def measured(self) -> list[float]:
        return [job.value for job in self.jobs if job.value is not None and math.isfinite(job.value)]

    @property
    def seeds(self) -> int:
        """Return over how many seeds the mean is taken."""
        return len(self.measured)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.measured) if self.measured else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over seeds; None of a single one."""
        return statistics.stdev(self.measured) if self.seeds >= MIN_SEEDS else None

    @property
    def text(self) -> str:
        """Return "2.300 ± 0.283 over 2 of 3 seeds"."""
        spread = f" ± {formatting.loss(self.spread)}" if self.spread is not None else ""
        seeds = f"{self.seeds} of " if self.seeds < len(self.jobs) else ""
        return f"{formatting.loss(self.mean)}{spread} over {seeds}{formatting.plural(len(self.jobs), 'seed')}"

    @property
    def label(self) -> str:
        """Return "learning_rate 0.001"."""
        return ", ".join(f"{path.rpartition('.')[2]} {value_text(value)}" for path, value in self.values.items())


@dataclass(frozen=True, slots=True)
class SweepStanding:
    """The result of a comparison: which job or setting is best, and the sentence that says so."""

    metric: str
    settings: tuple[SweepSetting, ...]
    """The best first, those with too few seeds last; empty if the sweep varies no seed."""
    best: tuple[JobValue, ...]
    """The best job, or all jobs of the best setting; empty if none is known to be better than the others."""
    text: str
    """The summary sentence; empty until something is measured."""

    @property
    def best_jobs(self) -> set[int]:
        return {job.job for job in self.best}


def value_text(value: Any) -> str:
    """Return a value of a sweep as its page shows it."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def metrics_of(latest: Iterable[dict[str, Any]]) -> list[str]:
    """Return what the jobs measure, validation and loss first."""
    found = {name for values in latest for name in values if not name.startswith(SPREADS)} - LEFT_OUT
    return [*(name for name in FIRST if name in found), *sorted(found - {*FIRST})][:MAX_METRICS]


def more_is_better(metric: str) -> bool:
    return any(word in metric for word in MORE_IS_BETTER)


def is_seed(path: str) -> bool:
    return path.rpartition(".")[2] == "seed"


def compare(
    metric: str, axes: Mapping[str, Sequence[Any]], jobs: Sequence[JobValue], *, is_over: bool
) -> SweepStanding:
    """Compare the jobs of a sweep over `axes` by the newest value of a metric."""
    # A job's values come in the database's order, which is alphabetical on PostgreSQL.
    jobs = [replace(job, values={path: job.values[path] for path in axes if path in job.values}) for job in jobs]
    seeds = [path for path, values in axes.items() if is_seed(path) and len(values) > 1]
    if not seeds:
        return _compare_jobs(metric, jobs, is_over=is_over)
    settings = _settings(jobs, seeds)
    if len(settings) == 1:
        return SweepStanding(metric, settings, (), _seeds_only(metric, settings[0]))
    return _compare_settings(metric, settings, is_over=is_over)


def _compare_jobs(metric: str, jobs: Sequence[JobValue], *, is_over: bool) -> SweepStanding:
    measured = [job for job in jobs if job.is_measured]
    if not measured:
        return SweepStanding(metric, (), (), "")
    best = min(measured, key=lambda job: _rank(metric, job.value))
    with_it = ", ".join(f"{path.rpartition('.')[2]} {value_text(value)}" for path, value in best.values.items())
    text = f"{_leads(metric, is_over=is_over)}: {best.name} with {with_it}, {formatting.loss(best.value)}."
    return SweepStanding(metric, (), (best,), text)


def _settings(jobs: Sequence[JobValue], seeds: Sequence[str]) -> tuple[SweepSetting, ...]:
    """Group the jobs by everything but their seeds, in the order of the sweep."""
    groups: dict[str, list[JobValue]] = {}
    for job in jobs:
        groups.setdefault(json.dumps(_without(job, seeds)), []).append(job)
    return tuple(SweepSetting(_without(group[0], seeds), tuple(group)) for group in groups.values())


def _without(job: JobValue, seeds: Sequence[str]) -> dict[str, Any]:
    return {path: value for path, value in job.values.items() if path not in seeds}


def _seeds_only(metric: str, setting: SweepSetting) -> str:
    """Return how far apart the seeds of one set-up are: "accuracy 0.950 to 0.970 over 5 seeds"."""
    values = setting.measured
    if len(values) < MIN_SEEDS:
        return ""
    ends = f"{formatting.loss(min(values))} to {formatting.loss(max(values))}"
    return f"No significant difference: {_words(metric)} {ends} over {formatting.plural(len(values), 'seed')}."


def _compare_settings(metric: str, settings: Sequence[SweepSetting], *, is_over: bool) -> SweepStanding:
    measured = [setting for setting in settings if setting.seeds >= MIN_SEEDS]
    measured.sort(key=lambda setting: _rank(metric, setting.mean))
    ordered = (*measured, *(setting for setting in settings if setting.seeds < MIN_SEEDS))
    if not measured:
        is_begun = any(setting.seeds for setting in settings)
        text = "No setting has been measured with two seeds yet, so none is ahead." if is_begun else ""
        return SweepStanding(metric, ordered, (), text)
    first = measured[0]
    if len(measured) == 1:
        text = f"Only {first.label} has been measured with two seeds: {_words(metric)} {first.text}."
        return SweepStanding(metric, ordered, (), text)
    margin = _margin(measured, first, measured[1])
    if abs((first.mean or 0.0) - (measured[1].mean or 0.0)) <= margin:
        text = (
            f"No significant difference in the {'highest' if more_is_better(metric) else 'lowest'} mean"
            f" {_words(metric)}: {first.label}, {first.text}; {measured[1].label}, {measured[1].text}."
        )
        return SweepStanding(metric, ordered, (), text)
    leads = _leads(f"mean {metric}", is_over=is_over)
    text = f"{leads}: {first.label}, {first.text}; next {measured[1].label}, {measured[1].text}."
    return SweepStanding(metric, ordered, first.jobs, text)


def _margin(settings: Sequence[SweepSetting], first: SweepSetting, second: SweepSetting) -> float:
    """Return by how much the means of two settings differ by chance, with 95 % certainty."""
    freedom = sum(setting.seeds - 1 for setting in settings)
    pooled = sum((setting.seeds - 1) * (setting.spread or 0.0) ** 2 for setting in settings) / freedom
    quantile = T_QUANTILES[max(degrees for degrees in T_QUANTILES if degrees <= freedom)]
    return quantile * math.sqrt(pooled * (1 / first.seeds + 1 / second.seeds))


def _leads(metric: str, *, is_over: bool) -> str:
    extreme = "highest" if more_is_better(metric) else "lowest"
    return f"{'Best' if is_over else 'Ahead'} by the {extreme} {_words(metric)}"


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _rank(metric: str, value: float | None) -> float:
    """Return a sort key, the best first."""
    assert value is not None
    return -value if more_is_better(metric) else value
