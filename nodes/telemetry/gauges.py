"""Export the cluster for Prometheus: agents, nodes, GPUs, Xids and the queue, in a constant number of queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from datetime import datetime

from django.db.models import Sum
from django.utils import timezone

from nodes.health.xid_severity import is_critical_xid
from nodes.models import Agent, Gpu, Holding, Node, NodeEvent, QueuedJob, Reading
from vigil_core.exposition import Family, Value

MIB = 1024 * 1024
GPU_LABELS = ("node", "gpu", "uuid")
_GPU_GAUGES: dict[str, tuple[str, float, str]] = {
    "vigil_gpu_utilization_ratio": ("gpu_percent", 0.01, "Share of the last second in which a kernel ran, 0 to 1."),
    "vigil_gpu_memory_used_bytes": ("memory_mib", MIB, "Memory in use."),
    "vigil_gpu_temperature_celsius": ("temperature_c", 1, "Temperature of the GPU."),
    "vigil_gpu_power_watts": ("watts", 1, "Power drawn."),
}
Samples = list[tuple[tuple[str, ...], Value]]


def families(now: datetime | None = None) -> Iterator[Family]:
    """Yield every metric family, also without samples. GPUs of machines whose agent is silent have no gauges."""
    now = now or timezone.now()
    nodes: Samples = [(row, 1) for row in Node.objects.order_by("name").values_list("name", "state")]
    agents = list(_agents({name for (name, _), _ in nodes}, now))
    up = {agent.pk: agent for agent in agents if agent.is_made_up or not agent.is_silent(now)}
    agent_samples: Samples = [((agent.node,), int(agent.pk in up)) for agent in agents]
    yield Family("vigil_agent_up", "gauge", "1: the node's agent reports; 0: it is silent.", ("node",), agent_samples)
    yield Family(
        "vigil_node_state", "gauge", "1 for the node's state according to the scheduler.", ("node", "state"), nodes
    )
    yield from _allocatable()
    yield from _gpu_gauges(up)
    yield from _driver_errors()
    unreadable: Samples = [((part,), count) for part, count in Reading.objects.values_list("part", "unreadable")]
    yield Family(
        "vigil_scheduler_unreadable_records", "gauge", "Unreadable records in the scheduler's last response.",
        ("part",), unreadable,
    )  # fmt: skip
    queued = QueuedJob.objects.order_by("partition", "state").values_list("partition", "state")
    jobs: Samples = [(tuple(where), count) for *where, count in queued.annotate(Sum("tasks"))]
    yield Family(
        "vigil_queue_jobs", "gauge", "Jobs in the scheduler's queue; each waiting task of an array is one.",
        ("partition", "state"), jobs,
    )  # fmt: skip


def _agents(nodes: Collection[str], now: datetime) -> Iterator[Agent]:
    """Yield the agents that have reported, without those of nodes that were taken away."""
    for agent in Agent.objects.exclude(heard_at=None).only("node", "heard_at", "newest", "is_made_up"):
        if agent.is_made_up or not (nodes and agent.is_retired(now, nodes)):
            yield agent


def _gpu_gauges(up: dict[int, Agent]) -> Iterator[Family]:
    rows = Gpu.objects.filter(gone_at=None).order_by("agent", "index").values_list("pk", "agent", "index", "uuid")
    newest = {pk: agent.newest.get("gpus", {}) for pk, agent in up.items()}
    gpus = [
        (pk, (up[agent].node, str(index), uuid), newest[agent].get(uuid, {}))
        for pk, agent, index, uuid in rows
        if agent in up
    ]
    for name, (field, factor, help_text) in _GPU_GAUGES.items():
        samples = [(labels, values[field] * factor) for _, labels, values in gpus if field in values]
        yield Family(name, "gauge", help_text, GPU_LABELS, samples)
    allocated_ids = set(Holding.objects.filter(until=None).values_list("gpu_id", flat=True))
    allocated: Samples = [(labels, int(pk in allocated_ids)) for pk, labels, _ in gpus]
    yield Family("vigil_gpu_allocated", "gauge", "1: allocated to a job of the scheduler.", GPU_LABELS, allocated)


def _allocatable() -> Iterator[Family]:
    """Yield the GPUs that the scheduler allocates, with the same definitions as "Free" and "In use" on pages."""
    nodes = list(Node.objects.order_by("name").only("name", "state", "gpus", "gpus_used"))
    totals: Samples = [((node.name,), node.gpus) for node in nodes]
    yield Family("vigil_node_gpus", "gauge", "GPUs that the scheduler allocates on the node.", ("node",), totals)
    free: Samples = [((node.name,), node.gpus_free) for node in nodes]
    yield Family(
        "vigil_node_gpus_free",
        "gauge",
        "GPUs that a job could get now; 0 on a node that accepts no jobs.",
        ("node",),
        free,
    )


def _driver_errors() -> Iterator[Family]:
    """Yield Xids by GPU and SXids by node since the first one; a counter must not vanish with its GPU.

    Prometheus sees no increase in a series that begins at 1, so an alert on `increase(…)` would miss the first error. A
    zero series per code and GPU would be too many; instead the counters of critical Xids and of SXids start at 0 for
    every GPU and every node that has GPUs.
    """
    nodes = dict(Agent.objects.order_by().values_list("pk", "node"))
    rows = Gpu.objects.order_by().values_list("pk", "agent", "index", "uuid")
    gpus = {pk: (nodes[agent], str(index), uuid) for pk, agent, index, uuid in rows}
    events = NodeEvent.objects.exclude(code=None).order_by()
    by_code: Counter[tuple[str, ...]] = Counter()
    critical: Counter[tuple[str, ...]] = Counter(dict.fromkeys(gpus.values(), 0))
    by_gpu = events.filter(kind="xid").values_list("agent", "gpu", "code").annotate(Sum("count"))
    for agent, gpu, code, count in by_gpu:
        of_gpu = gpus.get(gpu) or (nodes[agent], "", "")
        by_code[*of_gpu, str(code)] += count
        critical[of_gpu] += count if is_critical_xid(code) else 0
    with_gpus = {node for node, *_ in gpus.values()}
    switches: Counter[tuple[str, ...]] = Counter({(node, fatal): 0 for node in with_gpus for fatal in ("no", "yes")})
    by_node = events.filter(kind="sxid").values_list("agent", "data__fatal").annotate(Sum("count"))
    for agent, is_fatal, count in by_node:
        switches[nodes[agent], "yes" if is_fatal is True else "no"] += count
    for name, text, labels, counts in (
        ("vigil_gpu_xid_total", "Xids by number, as the kernel log reported them.", (*GPU_LABELS, "xid"), by_code),
        ("vigil_gpu_critical_xid_total", "Xids after which a GPU needs a reset or a repair.", GPU_LABELS, critical),
        ("vigil_nvswitch_sxid_total", "NVSwitch errors (SXids), fatal or not.", ("node", "fatal"), switches),
    ):
        yield Family(name, "counter", text, labels, sorted(counts.items()))
