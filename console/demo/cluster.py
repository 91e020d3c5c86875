"""Create the demo lab's cluster: nodes, partitions and a queue that the scheduler does not know."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from nodes.cluster import rows
from nodes.models import Fact, License, Node, Partition, QueuedJob
from nodes.schedulers import cluster
from nodes.schedulers.base import NodeStatus

HOUR_S, DAY_S = 3600.0, 86_400.0
GPUS = 8
DRAINED_HOURS = 10.0
# Ids beyond those that a demonstration's scheduler reaches.
_RUNNING = (
    # id, name, person, nodes with the GPUs held there, hours since its start, hours at most
    (910_101, "gpt-3b-pretrain", "ada.lindqvist", {"dgx-07": range(8), "dgx-08": range(8)}, 31.0, 48),
    (910_114, "gpt-760m-context-8k", "jonas.weber", {"dgx-01": range(8)}, 7.4, 12),
    (910_115, "gpt-760m-seed-2", "kofi.mensah", {"dgx-05": range(8)}, 5.1, 12),
    (910_120, "vit-l-augment", "mei.tanaka", {"dgx-02": range(4)}, 2.2, 8),
    (910_123, "notebook", "kofi.mensah", {"dgx-02": (6,)}, 14.0, 24),
    (910_126, "digits-distill", "mei.tanaka", {"dgx-06": range(4)}, 0.4, 2),
)


class _PendingJob(NamedTuple):
    """A made-up pending job."""

    number: int
    name: str
    user: str
    nodes: int
    gpus: int
    reason: str
    priority: int
    starts_in_hours: float | None
    waited_hours: float


_PENDING = tuple(_PendingJob(*fields) for fields in (
    (910_128, "gpt-1b3-two-nodes-long", "jonas.weber", 2, 16, "Resources", 184_220, 5.0, 3.1),
    (910_130, "vit-h-baseline", "mei.tanaka", 1, 8, "Priority", 171_004, 7.0, 2.4),
    (910_131, "gpt-760m-sweep", "kofi.mensah", 1, 4, "QOSMaxGRESPerUser", 160_551, None, 1.9),
    (910_133, "gpt-3b-evaluate", "ada.lindqvist", 1, 8, "Dependency", 150_120, None, 0.6),
))  # fmt: skip
_LICENSES = (cluster.LicenseInfo(name="abaqus", total=12, used=3), cluster.LicenseInfo(name="matlab", total=2, used=2))
_MADE_UP = (("interactive", ("dgx-04", "dgx-06"), 8, 1), ("h100", tuple(f"dgx-0{n}" for n in range(1, 9)), 48, 4))


def make(nodes: tuple[tuple[str, str, int, str], ...]) -> None:
    """Bring the made-up rows up to this hour without touching what a scheduler reported."""
    now = time.time()
    running = [_running(now, *story) for story in _RUNNING]
    rows.write(
        rows.differences(
            rows.NODES, _without_real(Node, "name", [_node(now, running, *node) for node in nodes]), made_up=True
        ),
        rows.differences(rows.PARTITIONS, _without_real(Partition, "name", _partitions()), made_up=True),
        rows.differences(rows.LICENSES, _without_real(License, "name", _LICENSES), made_up=True),
        rows.differences(
            rows.QUEUE,
            _without_real(QueuedJob, "scheduler_id", [*running, *(_pending(now, job) for job in _PENDING)]),
            made_up=True,
        ),
    )


def _without_real(model: type[Fact], key: str, made: Sequence[rows.ReportedRecord]) -> list[rows.ReportedRecord]:
    """Leave out rows whose names the scheduler uses for something real."""
    real = set(model._default_manager.filter(is_made_up=False).values_list(key, flat=True))
    return [row for row in made if getattr(row, key) not in real]


def _node(
    now: float, running: list[cluster.QueuedJobInfo], name: str, state: str, used: int, reason: str
) -> NodeStatus:
    taken = sorted(index for job in running for index in job.gpu_indices.get(name, ()))
    node = NodeStatus(
        name=name, state=state, partitions=tuple(p.name for p in _partitions() if name in p.nodes),
        features=("h100", "nvlink"), cpus=224, cpus_used=26 * used, gpus=GPUS, gpus_used=used, gpu_type="h100",
        gpus_allocated=tuple(taken), memory_mib=2_064_384, memory_used_mib=240_000 * used, load=24.5 * used,
        booted_at=now - 41 * DAY_S,
    )  # fmt: skip
    if not reason:
        return node
    text, _, requester = reason.removesuffix(")").rpartition(" (vigil: ")
    return replace(node, reason=text, reason_by=requester, reason_at=now - DRAINED_HOURS * HOUR_S)


def _partitions() -> list[cluster.PartitionInfo]:
    return [
        cluster.PartitionInfo(name=name, nodes=nodes, max_time_s=hours * 3600, max_nodes=most)
        for name, nodes, hours, most in _MADE_UP
    ]


def _running(
    now: float, number: int, name: str, user: str, nodes: dict[str, range], hours: float, limit: int
) -> cluster.QueuedJobInfo:
    gpus = sum(map(len, nodes.values()))
    started = now - hours * HOUR_S
    return cluster.QueuedJobInfo(
        scheduler_id=str(number), name=name, user=user, state="running", account=_account(user),
        partition="interactive" if name == "digits-distill" else "h100", qos="normal", priority=200_000,
        submitted_at=started - 900, started_at=started, ends_at=started + limit * HOUR_S, time_limit_s=limit * 3600,
        nodes=tuple(nodes), node_count=len(nodes), cpus=26 * gpus, gpus=gpus, gpu_type="h100",
        memory_mib=240_000 * gpus,
        gpu_indices={node: tuple(indices) for node, indices in nodes.items()},
    )  # fmt: skip


def _pending(now: float, job: _PendingJob) -> cluster.QueuedJobInfo:
    return cluster.QueuedJobInfo(
        scheduler_id=str(job.number), name=job.name, user=job.user, state="pending", account=_account(job.user),
        partition="h100", qos="normal", reason=job.reason, priority=job.priority,
        submitted_at=now - job.waited_hours * HOUR_S,
        starts_at=None if job.starts_in_hours is None else now + job.starts_in_hours * HOUR_S,
        time_limit_s=12 * 3600, node_count=job.nodes, cpus=26 * job.gpus, gpus=job.gpus, gpu_type="h100",
        memory_mib=240_000 * job.gpus, dependency="afterok:910101" if job.reason == "Dependency" else "",
    )  # fmt: skip


def _account(user: str) -> str:
    return "vision" if user.startswith("mei") else "language"
