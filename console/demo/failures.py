"""Create the demo lab's last three months: node-days and failures. One node fails too often."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from time import monotonic, sleep

import numpy as np
from django.utils import timezone

from console.demo.scenarios import NODES, PROJECTS
from jobs import lease
from jobs.failures import sums
from jobs.lease import ActiveLease
from jobs.models import Failure
from jobs.reliability.node_time import AttemptAllocation
from portal.models import Project

DAYS, DAY_S, GPUS = 90, 86_400.0, 8
WAIT_S = 20.0  # a count takes half of it at most
PROGRAM, PARTITION = "demo", "h100"
BAD_NODE, BAD_SINCE = "dgx-03", 24  # days ago
MACHINES = (
    ("gpu.ecc", 0.3), ("gpu.off_bus", 0.22), ("network.fabric", 0.2), ("scheduler.node_fail", 0.18),
    ("gpu.nvlink", 0.1),
)  # fmt: skip
PROGRAMS = (
    ("memory.gpu_oom", 0.34), ("program.exception", 0.3), ("program.config", 0.16), ("numerics.nan", 0.12),
    ("unknown", 0.08),
)  # fmt: skip


def make() -> None:
    """Create the failures once. Waits for the real counter; gives up where it counts all the time."""
    if Failure.objects.filter(program__startswith=PROGRAM).exists():
        return
    until = monotonic() + WAIT_S
    while (lent := lease.take("reliability")) is None:
        if monotonic() > until:
            return
        sleep(0.2)
    try:
        _make(lent)
    finally:
        lent.release()


def _make(counter_lease: ActiveLease) -> None:
    chance = np.random.default_rng(1450)
    projects = list(Project.objects.filter(slug__in=PROJECTS).order_by("slug"))
    today = timezone.now().astimezone(UTC).date()
    holdings, failures = [], []
    for back in range(DAYS, 3, -1):  # the last days are its jobs'
        day = today - timedelta(days=back)
        for number, (node, *_) in enumerate(NODES):
            project = projects[number % len(projects)]
            begin = datetime.combine(day, time(), UTC)
            until = begin + timedelta(seconds=DAY_S * float(chance.beta(8, 2)))
            holdings.append(AttemptAllocation(0, 0, project.pk, PARTITION, [node], GPUS, begin, until))
            rate = 0.34 if node == BAD_NODE and back < BAD_SINCE else 0.007
            failures += [_failure(chance, day, node, project, MACHINES) for _ in range(chance.poisson(rate))]
            failures += [_failure(chance, day, node, project, PROGRAMS) for _ in range(chance.poisson(0.03))]
    added = sums.prepare(holdings, [])
    with counter_lease.writing():
        added.write()
        Failure.objects.bulk_create(failures)


def _failure(
    chance: np.random.Generator, day: date, node: str, project: Project, causes: tuple[tuple[str, float], ...]
) -> Failure:
    names, weights = zip(*causes, strict=True)
    cause = str(chance.choice(names, p=weights))
    is_machine = causes is MACHINES
    lost = float(chance.exponential(1500 if is_machine else 900))
    at = datetime.combine(day, time(), UTC) + timedelta(seconds=int(chance.integers(0, 86_400)))
    return Failure(
        at=at, day=day, project=project, partition=PARTITION, node=node, cause=cause,
        program=f"{PROGRAM} {chance.integers(0, 10**6)}",
        is_interruption=is_machine or cause == "unknown", lost_node_s=lost, lost_gpu_s=GPUS * lost, is_settled=True,
        detect_s=float(chance.gamma(2, 4)), recover_s=float(chance.gamma(3, 90)) if is_machine else None,
    )  # fmt: skip
