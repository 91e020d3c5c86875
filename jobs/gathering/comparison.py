"""Read the series of two federations for their comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
from django.db.models import Sum

from jobs.intake.reports import owner_of
from jobs.models import Attempt, Client, Job
from jobs.presenting.federations.comparison import (
    TITLES,
    ComparedFederation,
    FederationComparison,
    JobRef,
    RoundCurve,
    compare,
)
from jobs.rounds import SENT
from portal.series import read
from portal.series.store import Owner

POINTS = 400
MIB = 2**20
SECONDS = "round_seconds"
DATA_OPTIONS = frozenset({
    "context", "features", "held_out", "noise", "samples", "source", "suffixes", "text_field", "tokenizer",
    "validation_percent",
})  # fmt: skip
"""Options of recipes that determine the data; the user's own program may have any."""
CLIENT_CODE = "client"


def compare_jobs(first: Job, second: Job) -> FederationComparison | None:
    return compare((_federation(first), _federation(second)))


def _federation(job: Job) -> ComparedFederation:
    attempts = Attempt.objects.filter(job=job).order_by("number").values_list("pk", flat=True)
    owners = [owner_of(pk) for pk in attempts]
    lines = {name: line for name in TITLES if len((line := _curve(owners, name)).round)}
    sent = [_cumulative(owners, name) for name in SENT]
    at = sent[0].round if len(sent[0].round) else sent[1].round
    total = sum(
        (np.interp(at, [0.0, *curve.round], [0.0, *curve.value]) for curve in sent), start=np.zeros(len(at), np.float64)
    )
    last = max((int(curve.round[-1]) for curve in (*lines.values(), *sent) if len(curve.round)), default=0)
    return ComparedFederation(
        job=JobRef(job.pk, job.name),
        rounds=last,
        lines=lines,
        sent=RoundCurve(at, total * MIB),
        seconds=_cumulative(owners, SECONDS),
        data=_data(job.spec.get("run") or {}),
        evaluation_samples=_evaluation_samples(job),
        setup=_setup(job),
        is_alive=job.latest is not None and job.latest.is_alive,
    )


def _setup(job: Job) -> object:
    """Return the [run] table without the seed; None if custom code is part of the setup."""
    run = job.spec.get("run") or {}
    return None if job.spec.get(CLIENT_CODE) else {name: value for name, value in run.items() if name != "seed"}


def _data(run: dict[str, Any]) -> dict[str, str]:
    recipe, split = str(run.get("recipe")), str(run.get("split"))
    options, divides = run.get(recipe) or {}, run.get(split) or {}
    decides = {name: value for name, value in options.items() if recipe == CLIENT_CODE or name in DATA_OPTIONS}
    return {
        "recipe": recipe,
        **{f"{recipe}.{name}": str(value) for name, value in decides.items()},
        "split": split,
        **{f"{split}.{name}": str(value) for name, value in divides.items()},
        "clients": str(run.get("clients")),
    }


def _evaluation_samples(job: Job) -> float | None:
    """Return the number of held-out samples, derived from the clients' training samples."""
    run = job.spec.get("run") or {}
    options = run.get(str(run.get("recipe"))) or {}
    every, percent = options.get("held_out"), options.get("validation_percent")
    part = 1 / every if every else percent / 100 if percent else 0.0
    samples = Client.objects.filter(job=job).aggregate(all=Sum("samples"))["all"]
    return samples * part / (1 - part) if samples and 0 < part < 1 else None


def _curve(owners: list[Owner], name: str) -> RoundCurve:
    found = read.curve(owners, name, points=POINTS)
    values = found.value if found.value is not None else found.mean
    assert values is not None
    is_finite = np.isfinite(values)
    return RoundCurve(found.step[is_finite].astype(np.float64), values[is_finite])


def _cumulative(owners: list[Owner], name: str) -> RoundCurve:
    """Return the cumulative sum by round. In a long series each point stands for several rounds."""
    curve = read.curve(owners, name, points=POINTS)
    if not len(curve.step):
        return RoundCurve(np.zeros(0), np.zeros(0))
    if curve.value is not None:
        return RoundCurve(curve.step.astype(np.float64), np.cumsum(np.nan_to_num(curve.value)))
    assert curve.mean is not None
    assert curve.last_step is not None
    ends = np.append(curve.step[1:] - 1, curve.last_step)
    widths = ends - curve.step + 1
    return RoundCurve(ends.astype(np.float64), np.cumsum(np.nan_to_num(curve.mean) * widths))
