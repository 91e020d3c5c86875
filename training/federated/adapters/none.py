"""All weights are trained, and travel."""

from __future__ import annotations

from training.data import Task


def adapt(task: Task) -> Task:
    return task
