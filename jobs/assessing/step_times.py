"""Measure the steps of recent attempts, and find nodes on which the same programs take longer steps than elsewhere."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any

import numpy as np
from django.db.models import F, Q

from jobs.assessing.repairs import repaired_at, rules_on
from jobs.intake.reports import owner_of
from jobs.models import Attempt, AttemptPace
from jobs.reliability.slow_nodes import StepTime, slow_nodes
from jobs.submitting.clone import source_of
from nodes.health.progress import Subject
from nodes.health.rules.condition import FieldValue
from nodes.models import HealthEntry, Node
from portal import database
from portal.series import read

logger = logging.getLogger(__name__)

SERIES = "step_seconds"
FIELDS = ("ratio", "programs", "slow_programs", "slow_share", "owners", "jobs", "other_nodes")
"""Those of the signal, named as in NodePace."""
WINDOW = timedelta(days=7)
REPAIRS = timedelta(days=90)
"""How far back repairs count: an attempt may have run for weeks when its node was repaired."""
REMEASURE_AFTER = timedelta(minutes=30)
"""How often an attempt that runs is measured."""
MAX_MEASURED = 200
BUDGET_S = 8.0
"""For measurements, per run: the lease is renewed before and after."""
MAX_TIMES = 20_000
MIN_STEPS = 50
POINTS = 400
# What changes no step's duration.
_OTHER_KEYS = frozenset(
    {"name", "project", "tags", "notes", "after", "restart", "seed", "learning_rate", "weight_decay", "steps", "epochs"}
)
_OTHER_RESOURCES = frozenset(
    {"time_limit", "qos", "reservation", "licenses", "begin", "require_nodes", "exclude_nodes", "spares", "partition"}
)


def measure(now: datetime) -> int:
    """Measure attempts that ended or ran on since they were last measured, for a few seconds; return how many."""
    rows = Attempt.objects.filter(Q(ended_at=None) | Q(ended_at__gt=now - 2 * WINDOW)).exclude(started_at=None)
    due = rows.exclude(nodes=[]).filter(
        Q(measured_pace=None) | Q(measured_pace__is_final=False, measured_pace__measured_at__lt=now - REMEASURE_AFTER)
    )
    types = dict(Node.objects.values_list("name", "gpu_type"))
    first = F("measured_pace__measured_at").asc(nulls_first=True)
    until, measured = time.monotonic() + BUDGET_S, []
    for attempt in due.select_related("job").order_by(first, "pk")[:MAX_MEASURED]:
        measured.append(_measured(attempt, types, now))
        if time.monotonic() > until:
            break  # the next run measures the rest
    AttemptPace.objects.bulk_create(
        measured,
        update_conflicts=True,
        unique_fields=["attempt"],
        update_fields=["program", "step_s", "steps", "measured_at", "is_final"],
    )
    return len(measured)


def _measured(attempt: Attempt, gpu_types: Mapping[str, str], now: datetime) -> AttemptPace:
    """Return the attempt's pace; without a step time if what is stored of it cannot be read."""
    pace = AttemptPace(attempt=attempt, measured_at=now, is_final=attempt.closed_at is not None)
    try:
        pace.step_s, pace.steps = _median_step(attempt)
        pace.program = _program(attempt, gpu_types)
    except database.ERRORS:
        raise
    except Exception:  # it would be the first one of the next run, too
        logger.exception("the step times of attempt %s cannot be read and are left out", attempt)
        pace.step_s = None
    return pace


def paces(now: datetime) -> dict[Subject, dict[str, FieldValue]]:
    """Return the fields of `step_time` of nodes, by the attempts of the last days.

    These are the nodes that are slower than others, and those with an open finding that can be compared.
    """
    repaired = repaired_at("step_time", now - REPAIRS)
    recent = Q(attempt__ended_at=None) | Q(attempt__ended_at__gt=now - WINDOW)
    rows = AttemptPace.objects.filter(recent, step_s__gt=0).exclude(program="").order_by("-attempt")
    values = rows.values_list(
        "program", "attempt__job__owner", "attempt__job", "attempt__nodes", "step_s", "attempt__started_at"
    )
    times = []
    for program, owner, job, nodes, step_s, started_at in values[:MAX_TIMES]:
        if step_s is None or started_at is None:
            continue
        if not any(node in repaired and started_at < repaired[node] for node in nodes):
            times.append(StepTime(program, owner, job, frozenset(nodes), step_s))
    judged = HealthEntry.objects.active().filter(rule__in=rules_on("step_time")).values_list("node", flat=True)
    return {
        Subject(pace.node): {name: getattr(pace, name) for name in FIELDS} for pace in slow_nodes(times, set(judged))
    }


def _median_step(attempt: Attempt) -> tuple[float | None, int]:
    """Return the median step time in seconds of rank 0, without the first tenth, and the number of steps."""
    curve = read.curve([owner_of(attempt.pk)], SERIES, points=POINTS)
    values = curve.value if curve.value is not None else curve.mean
    if values is None or curve.count < MIN_STEPS:
        return None, curve.count
    steady = values[len(values) // 10 :]
    steady = steady[np.isfinite(steady)]
    return (float(np.median(steady)), curve.count) if len(steady) else (None, curve.count)


def _program(attempt: Attempt, gpu_types: Mapping[str, str]) -> str:
    """Return a key that is equal for attempts whose steps should take equally long; "" if nodes are of two kinds.

    They are one person's and ran the same code, as far as Vigil sent or fetched it: another person's numbers are no
    measure of theirs.
    """
    types = {gpu_types.get(node, "") for node in attempt.nodes}
    if len(types) > 1:
        return ""
    spec = _without(attempt.job.spec, _OTHER_KEYS)
    resources = spec.get("resources") if isinstance(spec, dict) else None
    if isinstance(resources, dict):
        spec["resources"] = {name: value for name, value in resources.items() if name not in _OTHER_RESOURCES}
    source = source_of(attempt.job)
    code = [source.commit, source.digest] if source else []
    shape = [attempt.job.owner_id, code, spec, len(attempt.nodes), sorted(types)]
    return blake2b(json.dumps(shape, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def _without(value: Any, keys: frozenset[str]) -> Any:
    """Return a JSON value without these keys, at any depth."""
    if isinstance(value, dict):
        return {name: _without(inner, keys) for name, inner in value.items() if name not in keys}
    return [_without(inner, keys) for inner in value] if isinstance(value, list) else value
