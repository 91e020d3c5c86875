"""What the charts of a job's page draw: which series, how, and where attempts begin."""

from __future__ import annotations

from typing import Any

from jobs.life import Life
from jobs.models import Job

# Colours are the metric's own on every page: loss 1, validation 2, throughput 3, gradient 6.
LOSS = {
    "id": "loss",
    "title": "Loss",
    "width": "two-thirds",
    "height": 220,
    "scale": True,
    "smooth": True,
    "series": [
        {"name": "loss", "label": "training", "color": 1, "digits": 3},
        {"name": "validation_loss", "label": "validation", "color": 2, "digits": 3, "kind": "dots"},
    ],
}
RANKS = {
    "id": "ranks",
    "title": "Loss across ranks",
    "width": "third",
    "height": 220,
    "band": "loss",
    "series": [{"name": "loss", "label": "median", "color": 1, "digits": 3}],
}
STEP_TIME = {
    "id": "step_seconds",
    "title": "Step time",
    "unit": "seconds",
    "width": "third",
    "height": 120,
    "zero": True,
    "series": [
        {"name": "step_seconds", "label": "step", "color": 1},
        {"name": "data_seconds", "label": "waiting for data", "color": 2},
    ],
}


def figures(job: Job, life: Life) -> list[dict[str, Any]]:
    """The charts of this kind of job, in order."""
    breaks = _breaks(life)
    drawn = _of_script(job) if job.kind == "script" else _of_trainer(job)
    return [{**figure, "breaks": breaks} for figure in drawn]


def _of_trainer(job: Job) -> list[dict[str, Any]]:
    run = job.spec.get("run") or {}
    samples = run.get("recipe") == "vision"
    speed = {
        "id": "speed",
        "title": "Throughput",
        "unit": "samples a second" if samples else "tokens a second",
        "width": "third",
        "height": 120,
        "zero": True,
        "series": [
            {
                "name": "samples_per_second" if samples else "tokens_per_second",
                "label": "samples/s" if samples else "tokens/s",
                "color": 3,
            }
        ],
    }
    clip = run.get("clip")
    norm = {
        "id": "gradient_norm",
        "title": "Gradient norm",
        "width": "third",
        "height": 120,
        "series": [{"name": "gradient_norm", "label": "norm", "color": 6}],
        "limits": [{"label": "clip", "value": clip}] if clip else [],
    }
    return [LOSS, RANKS, speed, STEP_TIME, norm]


def _of_script(job: Job) -> list[dict[str, Any]]:
    return []


def _breaks(life: Life) -> list[dict[str, Any]]:
    """Where each attempt begins, and how the one before it ended."""
    before, found = None, []
    for attempt in life.attempts:
        if attempt.started_at is None:
            continue
        at = attempt.resume_from.step if attempt.resume_from else 0
        found.append({"at": at, "label": f"attempt {attempt.number}", "state": before})
        before = attempt.state
    return found


def first_paint(job: Job, life: Life) -> dict[str, Any] | None:
    """The curves as the API would answer them, so that the first picture needs no second request."""
    return None
