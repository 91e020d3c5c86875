"""What a comparison of federations asks of the series that their servers told."""

from __future__ import annotations

from typing import Any

import numpy as np
from django.db.models import Sum

from jobs.intake.reports import owner_of
from jobs.models import Attempt, Client, Job
from jobs.presenting.comparison import TITLES, Comparison, Line, Side, compare
from jobs.rounds import SENT
from portal.series import read
from portal.series.store import Owner

POINTS = 400
MIB = 2**20
SECONDS = "round_seconds"
OF_DATA = frozenset({
    "context", "features", "held_out", "noise", "samples", "source", "suffixes", "text_field", "tokenizer",
    "validation_percent",
})  # fmt: skip
"""Options of recipes that decide the data; a program of one's own may have any."""
OWN = "client"


def of(first: Job, second: Job) -> Comparison | None:
    return compare((_side(first), _side(second)))


def _side(job: Job) -> Side:
    attempts = Attempt.objects.filter(job=job).order_by("number").values_list("pk", flat=True)
    owners = [owner_of(pk) for pk in attempts]
    lines = {name: line for name in TITLES if len((line := _line(owners, name)).round)}
    sent = [_added(owners, name) for name in SENT]
    at = sent[0].round if len(sent[0].round) else sent[1].round
    together = sum(
        (np.interp(at, [0.0, *one.round], [0.0, *one.value]) for one in sent), start=np.zeros(len(at), np.float64)
    )
    last = max((int(one.round[-1]) for one in (*lines.values(), *sent) if len(one.round)), default=0)
    return Side(
        job=job,
        rounds=last,
        lines=lines,
        sent=Line(at, together * MIB),
        seconds=_added(owners, SECONDS),
        data=_data(job.spec.get("run") or {}),
        held_out=_held_out(job),
        setup=_setup(job),
        is_alive=job.latest is not None and job.latest.is_alive,
    )


def _setup(job: Job) -> object:
    """Return the whole of `[run]` but the seed; None where code of somebody's own decides, too."""
    run = job.spec.get("run") or {}
    return None if job.spec.get(OWN) else {name: value for name, value in run.items() if name != "seed"}


def _data(run: dict[str, Any]) -> dict[str, str]:
    recipe, split = str(run.get("recipe")), str(run.get("split"))
    options, divides = run.get(recipe) or {}, run.get(split) or {}
    decides = {name: value for name, value in options.items() if recipe == OWN or name in OF_DATA}
    return {
        "recipe": recipe,
        **{f"{recipe}.{name}": str(value) for name, value in decides.items()},
        "split": split,
        **{f"{split}.{name}": str(value) for name, value in divides.items()},
        "clients": str(run.get("clients")),
    }


def _held_out(job: Job) -> float | None:
    """Samples kept for validation, by those that the clients have."""
    run = job.spec.get("run") or {}
    options = run.get(str(run.get("recipe"))) or {}
    every, percent = options.get("held_out"), options.get("validation_percent")
    part = 1 / every if every else percent / 100 if percent else 0.0
    samples = Client.objects.filter(job=job).aggregate(all=Sum("samples"))["all"]
    return samples * part / (1 - part) if samples and 0 < part < 1 else None


def _line(owners: list[Owner], name: str) -> Line:
    found = read.curve(owners, name, points=POINTS)
    values = found.value if found.value is not None else found.mean
    assert values is not None
    is_known = np.isfinite(values)
    return Line(found.step[is_known].astype(np.float64), values[is_known])


def _added(owners: list[Owner], name: str) -> Line:
    """Of each round with all those before it. Of a long series each point stands for a stretch of rounds."""
    found = read.curve(owners, name, points=POINTS)
    if not len(found.step):
        return Line(np.zeros(0), np.zeros(0))
    if found.value is not None:
        return Line(found.step.astype(np.float64), np.cumsum(np.nan_to_num(found.value)))
    assert found.mean is not None
    assert found.last_step is not None
    ends = np.append(found.step[1:] - 1, found.last_step)
    widths = ends - found.step + 1
    return Line(ends.astype(np.float64), np.cumsum(np.nan_to_num(found.mean) * widths))
