"""Make rows of a cluster as schedulers report them."""

from __future__ import annotations

from typing import Any

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import QueuedJobInfo

HOUR_S = 3600


def node(name: str, state: str = "mixed", **facts: Any) -> NodeStatus:
    defaults: dict[str, Any] = {"name": name, "state": state, "partitions": ("gpu",), "gpus": 8, "cpus": 128}
    return NodeStatus(**defaults | facts)


def queued(number: int, **facts: Any) -> QueuedJobInfo:
    defaults: dict[str, Any] = {
        "scheduler_id": str(number),
        "name": f"slurm-{number}",
        "user": "other",
        "state": "pending",
    }
    return QueuedJobInfo(**defaults | {"partition": "gpu", "gpus": 8} | facts)
