"""Read what the charts of a job's page need: curves for the first paint, and the steps to mark."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from jobs import starting_steps
from jobs.gathering.job_life import JobLife
from jobs.intake.reports import owner_of
from jobs.models import Job
from jobs.presenting.job_page.charts import CLIENT_ACCURACY, LOSS_SERIES
from portal.series import read, store
from portal.series.read import Curve
from vigil_core import formatting

MAX_RESTARTS = 200
FIRST_POINTS = 500
SPEEDS = ("tokens_per_second", "samples_per_second", "step_seconds")


def marks(life: JobLife) -> dict[str, Any]:
    """Return the steps at which attempts begin, and those at which ranks restarted in place."""
    return {"breaks": _breaks(life), "restarts": _restarts(life)}


def first_paint(job: Job, life: JobLife) -> dict[str, Any] | None:
    """Return the lead chart's curves as the API would, so that the first paint needs no second request."""
    lead = CLIENT_ACCURACY["series"] if job.kind == "federated" else LOSS_SERIES
    if not job.job_kind.trains:
        return None
    items = [_item(read.curve(owners(life), str(s["name"]), points=FIRST_POINTS)) for s in lead]
    return {"items": [item for item in items if item["step"]], "bands": [], "version": life.latest.version}


def names(life: JobLife) -> list[str]:
    """Return the series that any attempt has reported."""
    return store.names(owners(life))


def owners(life: JobLife) -> list[tuple[str, int]]:
    """Return the owners of the series that make up the job's curves, in order."""
    return [owner_of(attempt.pk) for attempt in life.attempts]


def _breaks(life: JobLife) -> list[dict[str, Any]]:
    """Return the steps at which attempts begin, and how the attempt before each ended."""
    before, found = None, []
    for attempt in life.attempts:
        if attempt.started_at is None:
            continue
        at = attempt.resume_from.step if attempt.resume_from else 0
        found.append({"at": at, "label": f"attempt {attempt.number}", "state": before})
        before = formatting.family(attempt.state)
    return found


def _restarts(life: JobLife) -> list[int]:
    """Return the steps from which ranks continued after a restart in place, where the curve still shows them."""
    again = [attempt for attempt in life.attempts if attempt.incarnation]
    if not again:
        return []
    steps: dict[int, list[int]] = defaultdict(list)
    for (attempt_id, incarnation), step in sorted(starting_steps.steps(again, MAX_RESTARTS).items()):
        if incarnation > 0:
            steps[attempt_id].append(step)
    restarts: list[int] = []
    for attempt in life.attempts:
        if attempt.started_at is None:
            continue
        begins = attempt.resume_from.step if attempt.resume_from else 0
        for step in (begins, *steps[attempt.pk]):  # each repeats the steps after its checkpoint
            restarts = [before for before in restarts if before < step]
            restarts += [step] if step > begins else []
    return restarts


def _item(curve: Curve) -> dict[str, Any]:
    columns = {name: getattr(curve, name) for name in ("value", "min", "max", "mean")}
    shown = {name: [_short(v) for v in column.tolist()] for name, column in columns.items() if column is not None}
    return {"name": curve.name, "asked": 0, "step": curve.step.tolist(), "gaps": curve.gaps, **shown}


def _short(value: float) -> float | None:
    """Round to five digits, more than a pixel can show; None for values that JSON cannot represent."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
