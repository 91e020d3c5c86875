"""Find where ranks began: each incarnation of an attempt at the step of a checkpoint, or at 0.

The trainer reports it as it begins ("run.started"). A user's program does not: there the launcher's event counts, which
names the checkpoint that the program was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.incarnations import STARTED, number_of
from jobs.models import Attempt, Event, Job
from training.manifest import NAME
from vigil_core import untrusted

KINDS = frozenset({"run.started", STARTED})


def kind_of(job: Job) -> str:
    """Return the kind of event that reports where this job's ranks begin."""
    return STARTED if job.kind == "script" else "run.started"


def steps(attempts: Sequence[Attempt], most: int) -> dict[tuple[int, int], int]:
    """Return the step by (attempt id, incarnation), from the newest `most` events of a job's attempts, oldest first."""
    if not attempts:
        return {}
    kind = kind_of(attempts[0].job)
    rows = Event.objects.filter(attempt__in=list(attempts), kind=kind).order_by("-id")
    by_incarnation: dict[tuple[int, int], int] = {}
    for attempt_id, stream_incarnation, data in reversed(
        list(rows.values_list("attempt_id", "incarnation", "data")[:most])
    ):
        if kind == STARTED:  # reported by the launcher, whose stream has no incarnation
            incarnation, step = number_of(data), _step_of(data.get("resumed_from"))
        else:
            incarnation, step = stream_incarnation, untrusted.count(data.get("start_step"))
        if step is not None:
            by_incarnation.setdefault((attempt_id, incarnation or 0), step)
    return by_incarnation


def _step_of(resumed_from: Any) -> int | None:
    """Return the step of a checkpoint's name; 0 if there is none, None for another name."""
    if not resumed_from:
        return 0
    match = NAME.fullmatch(resumed_from) if isinstance(resumed_from, str) else None
    return int(match["step"]) if match else None
