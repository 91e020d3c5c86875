"""What is said of a waiting job: one thing in its way, and the facts that such things are told from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Literal

from jobs.why.limits import Check
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.scheduling.capacity import Cluster, Fit, Request, Seat
from vigil_core import formatting

Kind = Literal["limit", "nodes", "fragmentation", "priority", "dependency", "time", "reservation", "partition", "held"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One thing in the way. `amount`: of what the numbers are; `name`: of the limit, reservation, partition."""

    kind: Kind
    text: str
    name: str = ""
    amount: str = ""
    limit: int | None = None
    used: int | None = None
    asked: int | None = None
    is_said: bool = False  # it is what the scheduler's own word means
    is_final: bool = False  # waiting will not help


@dataclass(frozen=True, kw_only=True)
class QueueAhead:
    """The jobs ahead of it that wait for room, too. `named`: what the reader may know of them, five at most."""

    jobs: int
    gpus: int
    named: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    request: Request
    cluster: Cluster
    reason: str
    fit: Fit
    seats: Sequence[Seat]
    checks: Sequence[Check]
    ahead: QueueAhead
    free_until: float = inf  # when somebody ahead is planned to start where this could
    own: QueuedJobInfo | None = None
    names: Mapping[str, str]
    you: str = ""
    held_by_vigil: bool = False
    scheduler_id: str = ""
    job_id: int | None = None


def word_of(reason: str) -> str:
    """The scheduler's word without what comes after it: "ReqNodeNotAvail, UnavailableNodes:a" is the first."""
    return reason.partition(",")[0].strip("() ")


def are(number: int) -> str:
    return "is" if number == 1 else "are"


def clock(seconds: float, now: float) -> str:
    """A moment as people write it."""
    return formatting.clock(datetime.fromtimestamp(seconds, UTC), datetime.fromtimestamp(now, UTC))
