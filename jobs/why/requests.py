"""What a spec asks of a scheduler, as nodes/scheduling/capacity.py looks at it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.spec import JobSpec, seconds_of
from nodes.scheduling.capacity import Request


def request_of(spec: JobSpec, *, user: str = "", account: str = "") -> Request:
    """The allocation that a settled spec asks for. `user`, `account`: the scheduler's names of who asks."""
    asked, begin = spec.resources, spec.resources.begin_at
    return Request(
        min_nodes=asked.least_allocated,
        max_nodes=asked.most_allocated,
        cpus=asked.cpus_per_node,
        gpus=asked.gpus_per_node,
        gpu_type=asked.gpu_type,
        memory_mib=asked.memory_mib_per_node or 0,
        time_limit_s=asked.time_limit_seconds,
        exclusive=asked.exclusive,
        partition=asked.partition,
        constraint=asked.constraint,
        reservation=asked.reservation,
        licenses=asked.licenses,
        required_nodes=tuple(asked.require_nodes),
        excluded_nodes=tuple(asked.exclude_nodes),
        user=user,
        account=account,
        qos=asked.qos,
        begin_at=begin.timestamp() if begin else None,
    )


def request_outside(told: Mapping[str, Any], *, user: str) -> Request:
    """The allocation that somebody asked Slurm for past Vigil, as far as Slurm tells it (jobs.following.attached)."""
    return Request(
        min_nodes=told["nodes"],
        max_nodes=told["nodes"],
        cpus=told.get("cpus_per_node", 1),
        gpus=told.get("gpus_per_node", 0),
        gpu_type=told.get("gpu_type", ""),
        memory_mib=round(told.get("memory_gib", 0) * 1024),
        time_limit_s=seconds_of(told["time_limit"]) if "time_limit" in told else 0,
        partition=told.get("partition", ""),
        constraint=told.get("constraint", ""),
        reservation=told.get("reservation", ""),
        licenses=told.get("licenses", ""),
        user=user,
        account=told.get("account", ""),
        qos=told.get("qos", ""),
    )
