"""Build a request for nodes.scheduling.capacity from a spec. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.spec import JobSpec, seconds_of
from nodes.scheduling.capacity import Request


def request_of(spec: JobSpec, *, user: str = "", account: str = "") -> Request:
    """Return the allocation that a settled spec requests. `user`, `account`: of the requester in the scheduler."""
    resources, begin = spec.resources, spec.resources.begin_at
    return Request(
        min_nodes=resources.least_allocated,
        max_nodes=resources.most_allocated,
        cpus=resources.cpus_per_node,
        gpus=resources.gpus_per_node,
        gpu_type=resources.gpu_type,
        memory_mib=resources.memory_mib_per_node or 0,
        time_limit_s=resources.time_limit_seconds,
        exclusive=resources.exclusive,
        partition=resources.partition,
        constraint=resources.constraint,
        reservation=resources.reservation,
        licenses=resources.licenses,
        required_nodes=tuple(resources.require_nodes),
        excluded_nodes=tuple(resources.exclude_nodes),
        user=user,
        account=account,
        qos=resources.qos,
        begin_at=begin.timestamp() if begin else None,
    )


def request_of_attached(resources: Mapping[str, Any], *, user: str) -> Request:
    """Return the allocation that an attached job requested, as far as Slurm reports it (jobs.following.attached)."""
    return Request(
        min_nodes=resources["nodes"],
        max_nodes=resources["nodes"],
        cpus=resources.get("cpus_per_node", 1),
        gpus=resources.get("gpus_per_node", 0),
        gpu_type=resources.get("gpu_type", ""),
        memory_mib=round(resources.get("memory_gib", 0) * 1024),
        time_limit_s=seconds_of(resources["time_limit"]) if "time_limit" in resources else 0,
        partition=resources.get("partition", ""),
        constraint=resources.get("constraint", ""),
        reservation=resources.get("reservation", ""),
        licenses=resources.get("licenses", ""),
        user=user,
        account=resources.get("account", ""),
        qos=resources.get("qos", ""),
    )
