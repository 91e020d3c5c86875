"""Compute what pending jobs ahead leave free: each starts if it fits, else it blocks its planned start.

Pure, like capacity.py: dataclasses in, dataclasses out, no Django.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.scheduling import features, gpu_types
from nodes.scheduling.capacity import CandidateNode, ClusterCapacity, FreeCapacity, copies, free, of_partition
from nodes.scheduling.node_states import closed_reason


@dataclass(frozen=True, kw_only=True)
class JobsAhead:
    """The capacity that remains once every job ahead that fits has started, and until when it is free."""

    left: Mapping[str, FreeCapacity]
    waiting: tuple[QueuedJobInfo, ...] = ()  # ahead, without room yet; highest priority first
    until: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # by partition: the first planned start


MAX_PLACED = 100  # jobs ahead that fit the free resources: a scheduler starts those within seconds


def after(ahead: Sequence[QueuedJobInfo], cluster: ClusterCapacity) -> JobsAhead:
    """Allocate free resources to jobs in this order; jobs without room block theirs from their planned start.

    A plan names no nodes, so it blocks all nodes of its partition: what ends by then delays nobody.
    """
    left = {node.name: free(node) for node in cluster.nodes if not closed_reason(node.state)}
    by_partition: dict[str, list[NodeStatus]] = {}
    shapes_without_room: set[tuple[object, ...]] = set()
    waiting, placed = [], 0
    until: dict[str, tuple[float, str]] = {}
    for job in ahead:
        need, shape = _need(job), _shape(job)
        if shape not in shapes_without_room and placed < MAX_PLACED:
            if job.partition not in by_partition:
                there = of_partition(job.partition, cluster)
                by_partition[job.partition] = [node for node in there if node.name in left]
            if _place(job, need, by_partition[job.partition], left, cluster):
                placed += 1
                continue
            shapes_without_room.add(shape)
        waiting.append(job)
        planned = max(cluster.now, job.starts_at) if job.starts_at is not None else cluster.now
        for name in job.partition.split(","):
            if planned < until.get(name, (inf, ""))[0]:
                until[name] = (planned, job.scheduler_id)
    return JobsAhead(left=left, waiting=tuple(waiting), until=until)


def limited_by_plans(candidates: Iterable[CandidateNode], ahead: JobsAhead) -> list[CandidateNode]:
    """Return the candidates, each free only until a job ahead is planned to start in one of its node's partitions."""
    found = []
    for candidate in candidates:
        plans = [ahead.until[name] for name in candidate.node.partitions if name in ahead.until]
        plans += [ahead.until[""]] if "" in ahead.until else []
        first = min(plans, default=(inf, ""))
        found.append(replace(candidate, until=first[0], taken_by=first[1]) if first[0] < candidate.until else candidate)
    return found


def _need(job: QueuedJobInfo) -> FreeCapacity:
    """Return what a job needs on each of its nodes, shared evenly."""
    nodes = max(1, job.node_count)
    types = job.gpus_by_type or ({job.gpu_type: job.gpus} if job.gpu_type and job.gpus else {})
    each = {kind: -(-count // nodes) for kind, count in types.items()}
    gpus = max(-(-job.gpus // nodes), sum(each.values()))
    return FreeCapacity(-(-job.cpus // nodes), gpus, -(-job.memory_mib // nodes), each)


def _shape(job: QueuedJobInfo) -> tuple[object, ...]:
    """Return what determines where a job fits: if one job of a shape finds no room, neither does the next."""
    each = _need(job)
    types = tuple(sorted(each.types.items()))
    kind = (job.partition, types, job.features, job.reservation, job.node_count)
    return (*kind, each.cpus, each.gpus, each.memory_mib)


def _place(
    job: QueuedJobInfo,
    need: FreeCapacity,
    nodes: Sequence[NodeStatus],
    left: dict[str, FreeCapacity],
    cluster: ClusterCapacity,
) -> bool:
    """Allocate the job's need from `left`, if there is enough."""
    ways = features.read(job.features)
    every = ways[0].every if ways is not None and len(ways) == 1 else features.ANY
    chosen: list[tuple[str, int]] = []
    missing = max(1, job.node_count)
    for node in nodes:
        is_memory_reported = node.memory_mib > 0
        most = min(
            copies(need, left[node.name], is_memory_reported=is_memory_reported), _copies_by_type(need, left[node.name])
        )
        most = most if cluster.simulates_nodes else min(1, most)
        if most and features.holds(every, node.features):
            chosen.append((node.name, min(most, missing)))
            missing -= min(most, missing)
            if not missing:
                break
    if missing:
        return False
    for name, times in chosen:
        left[name] = left[name].less(_as_named(need, left[name]), times)
    return True


def _copies_by_type(need: FreeCapacity, room: FreeCapacity) -> int:
    """Return how often the GPUs that it requests by type are available."""
    return min(
        (gpu_types.count_of(room.types, kind) // each for kind, each in need.types.items() if kind and each),
        default=2**31,
    )


def _as_named(need: FreeCapacity, room: FreeCapacity) -> FreeCapacity:
    """Return the need with types spelt as the node spells them; a request without a type matches any."""
    spelt = {kind.lower(): kind for kind in room.types}
    return replace(need, types={spelt.get(kind.lower(), kind): each for kind, each in need.types.items() if kind})
