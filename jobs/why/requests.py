"""What a spec asks of a scheduler, as nodes/capacity.py looks at it. Pure."""

from __future__ import annotations

from jobs.spec import JobSpec
from nodes.capacity import Request


def request_of(spec: JobSpec, *, user: str = "", account: str = "") -> Request:
    """The allocation that the spec asks for. `user`, `account`: the scheduler's names of who asks."""
    asked = spec.resources
    return Request(
        min_nodes=asked.min_nodes,
        max_nodes=asked.max_nodes,
        cpus=asked.cpus_per_node,
        gpus=asked.gpus_per_node,
        gpu_type=asked.gpu_type,
        memory_mib=asked.memory_mib_per_node or 0,
        time_limit_s=asked.time_limit_seconds,
        exclusive=asked.exclusive,
        partition=asked.partition,
        constraint=asked.constraint,
        reservation=asked.reservation,
        required_nodes=tuple(asked.require_nodes),
        excluded_nodes=tuple(asked.exclude_nodes),
        user=user,
        account=account,
        qos=asked.qos,
    )
