"""Read the configuration of an acceptance's nodes from what their agents and the burn-in's program reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from nodes.acceptance.facts import (
    GpuConfiguration,
    GpuPeaks,
    NodeConfiguration,
    read_gpu,
    read_mounts,
    read_topology,
)
from nodes.inventory.software import NodeSoftware, read_facts
from nodes.models import Agent, BurnInNode, Gpu, Node, NodeEvent
from vigil_core import untrusted


def read_configuration(rows: Sequence[BurnInNode], now: datetime) -> list[NodeConfiguration]:
    """Return the current configuration of the nodes. Four queries, however many nodes there are."""
    names = [row.node for row in rows]
    agents = {agent.node: agent for agent in Agent.objects.filter(node__in=names)}
    scheduled = dict(Node.objects.filter(name__in=names).values_list("name", "gpus"))
    ids = [agent.pk for agent in agents.values()]
    gpus: defaultdict[int, list[Gpu]] = defaultdict(list)
    for gpu in Gpu.objects.filter(agent__in=ids, gone_at=None).order_by("index"):
        gpus[gpu.agent_id].append(gpu)
    slow: defaultdict[int, list[str]] = defaultdict(list)
    for event in NodeEvent.objects.filter(agent__in=ids, kind="mount.slow", is_open=True)[:1_000]:
        if not event.is_planted:
            slow[event.agent_id].append(untrusted.line(event.data.get("mount"), 200))
    nodes = [_node(row, agents.get(row.node), gpus, slow, now) for row in rows]
    return [_with_scheduler(node, scheduled.get(node.node, 0)) for node in nodes]


def read_software(rows: Sequence[BurnInNode]) -> list[NodeSoftware]:
    """Return the software that the agents of the nodes last reported."""
    agents = Agent.objects.filter(node__in=[row.node for row in rows]).order_by("node").values_list("node", "facts")
    return [read_facts(node, "", facts) for node, facts in agents]


def with_peaks(nodes: Sequence[NodeConfiguration], peaks: Mapping[str, GpuPeaks]) -> list[NodeConfiguration]:
    """Return the nodes with what was observed of their GPUs over the tests."""
    return [
        replace(node, gpus=tuple(gpu.with_peaks(peaks.get(gpu.uuid, GpuPeaks())) for gpu in node.gpus))
        for node in nodes
    ]  # fmt: skip


def _node(
    row: BurnInNode,
    agent: Agent | None,
    gpus: Mapping[int, Sequence[Gpu]],
    slow: Mapping[int, Sequence[str]],
    now: datetime,
) -> NodeConfiguration:
    machine = row.tested_machine
    configuration = NodeConfiguration(
        node=row.node,
        expected_gpus=max(row.gpus, machine.gpus if machine else 0),
        memlock_bytes=machine.memlock_bytes if machine else None,
        open_files=machine.open_files if machine else None,
        shm_bytes=machine.shm_bytes if machine else None,
    )
    if agent is None or agent.is_silent(now):
        return configuration
    return replace(
        configuration,
        is_reporting=True,
        has_token=bool(agent.token_digest),
        driver=untrusted.line(agent.facts.get("driver"), 64),
        kernel=untrusted.line(agent.facts.get("kernel"), 128),
        gpus=tuple(_gpu(gpu, agent) for gpu in gpus.get(agent.pk, ())),
        topology=read_topology(agent.facts),
        mounts=read_mounts(agent.facts),
        slow_mounts=tuple(slow.get(agent.pk, ())),
        clock_offset_s=agent.clock_offset_s,
    )


def _with_scheduler(node: NodeConfiguration, gpus: int) -> NodeConfiguration:
    return replace(node, scheduler_gpus=gpus, expected_gpus=max(node.expected_gpus, gpus))


def _gpu(gpu: Gpu, agent: Agent) -> GpuConfiguration:
    newest = agent.newest.get("gpus")
    sample = newest.get(gpu.uuid) if isinstance(newest, dict) else None
    facts = {**gpu.facts, "name": gpu.model, "memory_mib": gpu.memory_mib, "power_cap_watts": gpu.power_cap_watts}
    return read_gpu(gpu.uuid, gpu.index, facts, gpu.counters, sample)
