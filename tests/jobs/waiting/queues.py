"""Clusters, queues and jobs for tests of explanations, and the resulting text."""

from __future__ import annotations

from typing import Any

from jobs.spec import JobSpec
from jobs.waiting.explain import WaitExplanation, WaitingJob, explain
from jobs.waiting.requests import request_of
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo, QueuedJobInfo
from nodes.scheduling.capacity import ClusterCapacity
from tests.jobs.submissions import spec_of

NOW = 1_763_700_000.0
GPU = "gres/gpu"


def node(name: str, used: int = 0, **facts: Any) -> NodeStatus:
    given = {"state": "idle", "cpus": 64, "gpus": 8, "memory_mib": 512_000, "gpu_type": "h100", "partitions": ("gpu",)}
    return NodeStatus(name=name, gpus_used=used, cpus_used=used, **{**given, **facts})


def cluster(*nodes: NodeStatus, **facts: Any) -> ClusterCapacity:
    given = {"partitions": (PartitionInfo(name="gpu", is_default=True),), "now": NOW}
    return ClusterCapacity(nodes=nodes, **{**given, **facts})


def queued(scheduler_id: str, gpus: int = 0, *, state: str = "pending", nodes: int = 1, **facts: Any) -> QueuedJobInfo:
    given = {"name": "j", "user": "oskar", "partition": "gpu", "account": "vision", "cpus": gpus or 1}
    return QueuedJobInfo(scheduler_id=scheduler_id, state=state, gpus=gpus, node_count=nodes, **{**given, **facts})


def gpu_spec(nodes: int = 1, gpus: int = 8, limit: str = "12:00:00", **run: Any) -> JobSpec:
    options = {"nodes": nodes, "gpus_per_node": gpus, "time_limit": limit}
    return spec_of(resources=options, run={"global_batch": 32, **run})


def why(spec: JobSpec, where: ClusterCapacity, reason: str = "Resources", **facts: Any) -> WaitExplanation:
    request = request_of(spec, user="oskar", account="vision")
    return explain(WaitingJob(spec=spec, request=request, reason=reason, **{"scheduler_id": "77", **facts}), where)


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def texts(found: WaitExplanation) -> list[str]:
    return [plain(block.text) for block in found.blocks]


def now(found: WaitExplanation) -> list[dict[str, Any]]:
    return [variant.changes for variant in found.variants if variant.starts_now]
