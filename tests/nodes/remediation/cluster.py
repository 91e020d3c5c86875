"""Nodes with agents under a scripted or a real scheduler, for tests of what health rules find and what follows."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from nodes.cluster import drain, sync
from nodes.models import Agent, Assessment, HealthEntry, Reading
from nodes.monitoring.evaluate import evaluate
from nodes.remediation.decide import decide
from nodes.remediation.return_to_service import return_recovered
from nodes.schedulers.base import NodeStatus, Scheduler
from nodes.schedulers.cluster import PartitionInfo
from nodes.scheduling import node_states
from nodes.tasks import health
from tests.jobs.schedulers import ScriptedScheduler
from tests.nodes.telemetry.reporting import UUIDS, Machine

PACE = timedelta(seconds=80)
"""Between evaluations of a state that lasts: the worker looks every five seconds, and after 90 it is unknown."""
NAMES = tuple(f"dgx-{number:02}" for number in range(1, 13))


def gpus_of(node: str) -> tuple[str, ...]:
    return tuple(f"{uuid}-{node}" for uuid in UUIDS[:2])


def evaluate_until(moment: datetime, since: datetime | None = None, *, silent: Collection[str] = ()) -> None:
    """Evaluate until this moment, as the worker does, while all agents but the silent ones report.

    What is assessed stays as it was.
    """
    moments = [moment]
    while moments[0] - PACE > (since or datetime.now(UTC)):
        moments.insert(0, moments[0] - PACE)
    for now in moments:
        Agent.objects.exclude(node__in=silent).update(heard_at=now)
        Reading.objects.update(read_at=now)
        Assessment.objects.update(assessed_at=now)
        evaluate(now)


@dataclass
class AgentFleet:
    """Nodes' agents and their scheduler. `step` does what the workers do every few seconds."""

    names: tuple[str, ...] = NAMES
    scheduler: Scheduler = field(default_factory=ScriptedScheduler)
    machines: dict[str, Machine] = field(default_factory=dict)
    seq: int = 0
    evaluated_at: datetime | None = None

    @property
    def node(self) -> str:
        """Return the first node, which tests break."""
        return self.names[0]

    def machine(self, node: str = "") -> Machine:
        """Return the node's agent, which has reported its GPUs."""
        node = node or self.node
        if node not in self.machines:
            self.machines[node] = Machine(node=node, gpus=gpus_of(node))
            self.machines[node].post(self.machines[node].facts(time.time()))
        return self.machines[node]

    def xid(self, code: int, node: str = "", gpu: int = 0, *, ago: float = 0, text: str = "") -> None:
        self.seq += 1
        machine = self.machine(node)
        about = {"xid": code, "seq": self.seq, "text": text or f"code {code}", "gpu": machine.gpus[gpu]}
        assert machine.post(machine.event("xid", time.time() - ago, **about)).status_code == 200

    def happens(self, kind: str, node: str = "", *, ago: float = 0, **more: Any) -> None:
        machine = self.machine(node)
        assert machine.post(machine.event(kind, time.time() - ago, **more)).status_code == 200

    def step(self) -> None:
        health()
        drain.carry_out(self.scheduler)
        sync.read(self.scheduler, Reading.Part.NODES)

    def later(self, minutes: float, *, silent: Collection[str] = (), is_watched: bool = True) -> None:
        """Do what the workers do until then, while the scheduler and all agents but the silent ones report.

        `is_watched`: whether the workers ran in between.
        """
        now = datetime.now(UTC) + timedelta(minutes=minutes)
        evaluate_until(now, self.evaluated_at if is_watched else now, silent=silent)
        self.evaluated_at = now
        decide(now)
        return_recovered()
        Reading.objects.update(read_at=datetime.now(UTC))
        drain.carry_out(self.scheduler)
        sync.read(self.scheduler, Reading.Part.NODES)

    def entry(self, rule: str = "off-bus", node: str = "") -> HealthEntry:
        return HealthEntry.objects.get(rule=rule, node=node or self.node)

    def drained_nodes(self) -> dict[str, str]:
        """Return the reason of each drained node, as the scheduler itself reports it."""
        nodes = self.scheduler.nodes()
        return {n.name: n.reason for n in nodes if node_states.is_drained(n.state)}

    def set_state(self, state: str) -> None:
        """Let the scheduler report this state of the first node from now on."""
        raise NotImplementedError


@dataclass
class Lab(AgentFleet):
    """A cluster of twelve nodes with a scheduler that reports what a test wants."""

    scheduler: ScriptedScheduler = field(default_factory=ScriptedScheduler)

    def __post_init__(self) -> None:
        status = NodeStatus(name="", state="idle", cpus=64, gpus=2, memory_mib=65_536, gpu_type="h100")
        self.scheduler.machines = [replace(status, name=name, partitions=("gpu",)) for name in self.names]
        self.scheduler.divided = [PartitionInfo(name="gpu", is_default=True, nodes=self.names)]
        sync.read(self.scheduler)

    def set_state(self, state: str) -> None:
        machines = self.scheduler.machines
        self.scheduler.machines = [replace(m, state=state) if m.name == self.node else m for m in machines]
        sync.read(self.scheduler, Reading.Part.NODES)
