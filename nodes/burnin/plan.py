"""Plan a burn-in: for how long, which nodes, and what each tests. No Django, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_SECONDS, MAX_SECONDS = 60, 48 * 3600
DEFAULT_SECONDS = 600
MAX_NODES = 256
MAX_MOUNTS = 32
OVERHEAD_S = 1_800
"""Beyond the time for tests: processes that start, and a last cycle that runs over."""
TURN_S = 30
"""For one all-reduce between two nodes, which is as short as a second in a short burn-in of many nodes: they find each
other and start processes that import torch."""


@dataclass(frozen=True)
class GpuGroup:
    """The nodes of a burn-in with equally many GPUs."""

    gpus: int
    nodes: tuple[str, ...]


def gpu_groups(gpus: Mapping[str, int]) -> list[GpuGroup]:
    """Group nodes by their number of GPUs, the most first; `gpus` is by node.

    All nodes are one allocation, so that every two can meet. A Slurm step has equally many GPUs on each of its nodes:
    with the least number everywhere, the other GPUs would stay untested. So each group is a step of its own.
    """
    numbers = sorted(set(gpus.values()), reverse=True)
    return [GpuGroup(number, tuple(sorted(n for n in gpus if gpus[n] == number))) for number in numbers]


def time_limit_s(seconds: int, nodes: int) -> int:
    """Return the time limit of a burn-in's job on so many nodes."""
    return seconds * 2 + OVERHEAD_S + TURN_S * (nodes - 1)


def plan_text(nodes: Sequence[str], seconds: int, *, mounts: Sequence[str], scratch: str) -> str:
    """Return plan.json, which `training.burnin.plan` reads on every node."""
    return json.dumps(
        {
            "nodes": list(nodes),
            "seconds": seconds,
            "mounts": list(mounts)[:MAX_MOUNTS],
            "scratch": scratch,
        }
    )
