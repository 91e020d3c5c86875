"""The cluster as numbers for Prometheus: agents, nodes, GPUs, Xids and the queue, in a few queries however many."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from django.db.models import Sum
from django.utils import timezone

from nodes.models import Agent, Gpu, Holding, Node, NodeEvent, QueuedJob
from portal.exposition import Family, Value

MIB = 1024 * 1024
GPU_LABELS = ("node", "gpu", "uuid")
_OF_GPUS: dict[str, tuple[str, float, str]] = {
    "vigil_gpu_utilization_ratio": ("gpu_percent", 0.01, "Share of the last second in which a kernel ran, 0 to 1."),
    "vigil_gpu_memory_used_bytes": ("memory_mib", MIB, "Memory in use."),
    "vigil_gpu_temperature_celsius": ("temperature_c", 1, "Temperature of the GPU."),
    "vigil_gpu_power_watts": ("watts", 1, "Power drawn."),
}
Samples = list[tuple[tuple[str, ...], Value]]


def families(now: datetime | None = None) -> Iterator[Family]:
    """Every family, also those that have no samples now. Of a silent agent's machine no GPU's gauge is told."""
    now = now or timezone.now()
    agents = list(Agent.objects.exclude(heard_at=None).only("node", "heard_at", "newest", "is_made_up"))
    up = {agent.pk: agent for agent in agents if agent.is_made_up or not agent.is_silent(now)}
    told: Samples = [((agent.node,), int(agent.pk in up)) for agent in agents]
    yield Family("vigil_agent_up", "gauge", "1: the node's agent reports; 0: it is silent.", ("node",), told)
    nodes: Samples = [(row, 1) for row in Node.objects.order_by("name").values_list("name", "state")]
    yield Family(
        "vigil_node_state", "gauge", "1 for the state that the scheduler says the node is in.", ("node", "state"), nodes
    )
    yield from _of_gpus(up)
    yield _xids()
    queued = QueuedJob.objects.order_by("partition", "state").values_list("partition", "state")
    jobs: Samples = [(tuple(where), many) for *where, many in queued.annotate(Sum("tasks"))]
    yield Family(
        "vigil_queue_jobs", "gauge", "Jobs in the scheduler's queue; each waiting task of an array is one.",
        ("partition", "state"), jobs,
    )  # fmt: skip


def _of_gpus(up: dict[int, Agent]) -> Iterator[Family]:
    rows = Gpu.objects.filter(gone_at=None).order_by("agent", "index").values_list("pk", "agent", "index", "uuid")
    newest = {pk: agent.newest.get("gpus", {}) for pk, agent in up.items()}
    gpus = [
        (pk, (up[agent].node, str(index), uuid), newest[agent].get(uuid, {}))
        for pk, agent, index, uuid in rows
        if agent in up
    ]
    for name, (field, factor, told) in _OF_GPUS.items():
        samples = [(labels, values[field] * factor) for _, labels, values in gpus if field in values]
        yield Family(name, "gauge", told, GPU_LABELS, samples)
    held = set(Holding.objects.filter(until=None).values_list("gpu_id", flat=True))
    allocated: Samples = [(labels, int(pk in held)) for pk, labels, _ in gpus]
    yield Family("vigil_gpu_allocated", "gauge", "1: one of the scheduler's jobs holds it.", GPU_LABELS, allocated)


def _xids() -> Family:
    """Counts since the first: also of GPUs and machines that are silent or gone, for a counter must not vanish."""
    rows = NodeEvent.objects.filter(kind="xid").exclude(code=None).order_by()
    sums = list(rows.values_list("agent", "gpu", "code").annotate(Sum("count")))
    nodes = dict(Agent.objects.values_list("pk", "node"))
    gpus = (
        {pk: (str(index), uuid) for pk, index, uuid in Gpu.objects.values_list("pk", "index", "uuid")} if sums else {}
    )
    samples: Samples = [
        ((nodes[agent], *gpus.get(gpu, ("", "")), str(code)), many) for agent, gpu, code, many in sums if agent in nodes
    ]
    return Family(
        "vigil_gpu_xid_total",
        "counter",
        "Xids by number, as the kernel log told them.",
        (*GPU_LABELS, "xid"),
        sorted(samples),
    )
