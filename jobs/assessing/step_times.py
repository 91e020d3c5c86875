"""Measure the steps of recent attempts, and find nodes on which the same programs take longer steps than elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

import numpy as np
from django.db.models import Max, Q

from jobs.intake.reports import owner_of
from jobs.models import Attempt, AttemptPace
from jobs.reliability.slow_nodes import StepTime, slow_nodes
from nodes.health.progress import Subject
from nodes.health.rules.condition import FieldValue
from nodes.models import HealthEntry, Node
from portal.series import read

SERIES = "step_seconds"
RULE = "slow-for-its-kind"
WINDOW = timedelta(days=7)
REMEASURE_AFTER = timedelta(minutes=30)
"""How often an attempt that runs is measured."""
MOST_MEASURED = 200
MOST_TIMES = 20_000
LEAST_STEPS = 50
POINTS = 400
# What changes no step's duration.
_OTHER_KEYS = frozenset(
    {"name", "project", "tags", "notes", "after", "restart", "seed", "learning_rate", "weight_decay", "steps", "epochs"}
)
_OTHER_RESOURCES = frozenset(
    {"time_limit", "qos", "reservation", "licenses", "begin", "require_nodes", "exclude_nodes", "spares", "partition"}
)


def measure(now: datetime) -> int:
    """Measure attempts that ended or ran on since they were last measured; return how many."""
    rows = Attempt.objects.filter(started_at__gt=now - 2 * WINDOW).exclude(nodes=[])
    due = rows.filter(
        Q(measured_pace=None) | Q(measured_pace__is_final=False, measured_pace__measured_at__lt=now - REMEASURE_AFTER)
    )
    types = dict(Node.objects.values_list("name", "gpu_type"))
    measured = []
    for attempt in due.select_related("job").order_by("measured_pace__measured_at", "pk")[:MOST_MEASURED]:
        step_s, steps = _median_step(attempt)
        measured.append(
            AttemptPace(
                attempt=attempt,
                program=_program(attempt, types),
                step_s=step_s,
                steps=steps,
                measured_at=now,
                is_final=attempt.closed_at is not None,
            )
        )
    AttemptPace.objects.bulk_create(
        measured,
        update_conflicts=True,
        unique_fields=["attempt"],
        update_fields=["program", "step_s", "steps", "measured_at", "is_final"],
    )
    return len(measured)


def paces(now: datetime) -> dict[Subject, dict[str, FieldValue]]:
    """Return the fields of `step_time` of each node that is slower than others, by attempts of the last days."""
    cleared = HealthEntry.objects.filter(rule=RULE, state="cleared", cleared_at__gt=now - WINDOW).exclude(
        decided_by=None
    )  # a finding that ended by itself may come back by the same steps; what a person repaired may not
    repaired = dict(cleared.order_by().values_list("node").annotate(Max("cleared_at")))
    rows = AttemptPace.objects.filter(measured_at__gt=now - WINDOW, step_s__gt=0).exclude(program="")
    values = rows.order_by("-measured_at").values_list("program", "attempt__nodes", "step_s", "attempt__started_at")
    times = []
    for program, nodes, step_s, started_at in values[:MOST_TIMES]:
        is_before = any(node in repaired and started_at < repaired[node] for node in nodes)
        if step_s is not None and not is_before:
            times.append(StepTime(program, frozenset(nodes), step_s))
    return {
        Subject(pace.node): {
            "ratio": pace.ratio,
            "programs": pace.programs,
            "slow_programs": pace.slow_programs,
            "slow_share": pace.slow_share,
            "attempts": pace.attempts,
            "other_nodes": pace.other_nodes,
        }
        for pace in slow_nodes(times)
    }


def _median_step(attempt: Attempt) -> tuple[float | None, int]:
    """Return the median step time in seconds of rank 0, without the first tenth, and the number of steps."""
    curve = read.curve([owner_of(attempt.pk)], SERIES, points=POINTS)
    values = curve.value if curve.value is not None else curve.mean
    if values is None or curve.count < LEAST_STEPS:
        return None, curve.count
    steady = values[len(values) // 10 :]
    steady = steady[np.isfinite(steady)]
    return (float(np.median(steady)), curve.count) if len(steady) else (None, curve.count)


def _program(attempt: Attempt, gpu_types: Mapping[str, str]) -> str:
    """Return a key that is equal for attempts whose steps should take equally long; "" if nodes are of two kinds."""
    types = {gpu_types.get(node, "") for node in attempt.nodes}
    if len(types) > 1:
        return ""
    spec = _without(attempt.job.spec, _OTHER_KEYS)
    resources = spec.get("resources") if isinstance(spec, dict) else None
    if isinstance(resources, dict):
        spec["resources"] = {name: value for name, value in resources.items() if name not in _OTHER_RESOURCES}
    shape = [spec, len(attempt.nodes), sorted(types)]
    return blake2b(json.dumps(shape, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return a JSON value without these keys, at any depth."""
    if isinstance(value, dict):
        return {name: _without(inner, keys) for name, inner in value.items() if name not in keys}
    return [_without(inner, keys) for inner in value] if isinstance(value, list) else value
