"""A cluster of twelve nodes with agents, for tests of what health rules find and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from nodes.cluster import drain, sync
from nodes.models import Agent, HealthEntry, Reading
from nodes.monitoring.evaluate import evaluate
from nodes.remediation.act import decide
from nodes.remediation.return_to_service import return_recovered
from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo
from nodes.tasks import health
from tests.jobs.schedulers import ScriptedScheduler
from tests.nodes.telemetry.reporting import UUIDS, Machine

NAMES = tuple(f"dgx-{number:02}" for number in range(1, 13))


def gpus_of(node: str) -> tuple[str, ...]:
    return tuple(f"{uuid}-{node}" for uuid in UUIDS[:2])


@dataclass
class Lab:
    """The nodes' agents and their scheduler. `step` does what the workers do every few seconds."""

    names: tuple[str, ...] = NAMES
    scheduler: ScriptedScheduler = field(default_factory=ScriptedScheduler)
    machines: dict[str, Machine] = field(default_factory=dict)
    seq: int = 0

    def __post_init__(self) -> None:
        status = NodeStatus(name="", state="idle", cpus=64, gpus=2, memory_mib=65_536, gpu_type="h100")
        self.scheduler.machines = [replace(status, name=name, partitions=("gpu",)) for name in self.names]
        self.scheduler.divided = [PartitionInfo(name="gpu", is_default=True, nodes=self.names)]
        sync.read(self.scheduler)

    def machine(self, node: str = "dgx-01") -> Machine:
        """Return the node's agent, which has reported its GPUs."""
        if node not in self.machines:
            self.machines[node] = Machine(node=node, gpus=gpus_of(node))
            self.machines[node].post(self.machines[node].facts(time.time()))
        return self.machines[node]

    def xid(self, code: int, node: str = "dgx-01", gpu: int = 0, *, ago: float = 0, text: str = "") -> None:
        self.seq += 1
        machine = self.machine(node)
        about = {"xid": code, "seq": self.seq, "text": text or f"code {code}", "gpu": machine.gpus[gpu]}
        assert machine.post(machine.event("xid", time.time() - ago, **about)).status_code == 200

    def happens(self, kind: str, node: str = "dgx-01", *, ago: float = 0, **more: Any) -> None:
        machine = self.machine(node)
        assert machine.post(machine.event(kind, time.time() - ago, **more)).status_code == 200

    def step(self) -> None:
        health()
        drain.carry_out(self.scheduler)
        sync.read(self.scheduler, Reading.Part.NODES)

    def later(self, minutes: float, *, silent: Collection[str] = ()) -> None:
        """Do what the workers do at that time, while the scheduler and all agents but the silent ones report."""
        now = datetime.fromtimestamp(time.time() + 60 * minutes, UTC)
        Agent.objects.exclude(node__in=silent).update(heard_at=now)
        Reading.objects.update(read_at=now)
        evaluate(now)
        decide(now)
        return_recovered()
        Reading.objects.update(read_at=datetime.now(UTC))
        drain.carry_out(self.scheduler)
        sync.read(self.scheduler, Reading.Part.NODES)

    def entry(self, rule: str = "off-bus", node: str = "dgx-01") -> HealthEntry:
        return HealthEntry.objects.get(rule=rule, node=node)
