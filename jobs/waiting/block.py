"""Describe what keeps a job waiting: `Block`, and the facts that blocks are built from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Literal

from jobs.waiting.limits import LimitCheck
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.scheduling.capacity import CandidateNode, ClusterCapacity, Fit, Request
from nodes.scheduling.maintenance import PlannedMaintenance
from vigil_core import formatting

BlockKind = Literal[
    "limit",
    "nodes",
    "fragmentation",
    "priority",
    "dependency",
    "time",
    "reservation",
    "partition",
    "held",
    "maintenance",
]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One thing that keeps a job waiting.

    `amount`: what the numbers count; `name`: of the limit, reservation, partition or maintenance.
    """

    kind: BlockKind
    text: str
    name: str = ""
    amount: str = ""
    limit: int | None = None
    used: int | None = None
    requested: int | None = None
    is_reason: bool = False  # it is what the scheduler's own word means
    is_final: bool = False  # waiting will not help


@dataclass(frozen=True, kw_only=True)
class QueueAhead:
    """The jobs ahead of it that also wait for resources. `named`: at most five that the reader may see."""

    jobs: int
    gpus: int
    named: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MaintenanceEffect:
    """A window and those of its nodes that the job could use. `is_blocking`: it keeps the job from these nodes now."""

    window: PlannedMaintenance
    nodes: tuple[str, ...]
    text: str
    is_blocking: bool


@dataclass(frozen=True, kw_only=True)
class WaitFacts:
    """Everything that blocks are built from."""

    request: Request
    cluster: ClusterCapacity
    reason: str
    fit: Fit
    candidates: Sequence[CandidateNode]
    checks: Sequence[LimitCheck]
    ahead: QueueAhead
    maintenance: Sequence[MaintenanceEffect] = ()
    free_until: float = inf  # when a job ahead is planned to start on nodes that fit this one
    queued: QueuedJobInfo | None = None
    names: Mapping[str, str]
    you: str = ""
    waits_in_vigil: bool = False
    scheduler_id: str = ""
    job_id: int | None = None


def reason_word(reason: str) -> str:
    """Return the scheduler's reason without details: "ReqNodeNotAvail" of "ReqNodeNotAvail, UnavailableNodes:a"."""
    return reason.partition(",")[0].strip("() ")


def are(number: int) -> str:
    return "is" if number == 1 else "are"


def clock(seconds: float, now: float) -> str:
    """Return a Unix time as people write it."""
    return formatting.clock(datetime.fromtimestamp(seconds, UTC), datetime.fromtimestamp(now, UTC))
