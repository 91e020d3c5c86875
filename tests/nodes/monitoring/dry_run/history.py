"""A small cluster with stored history, for tests of what rules would have found."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from nodes.models import Agent, Gpu, Holding, Node, NodeEvent, Partition
from nodes.telemetry.fields import gpu_owner, host_owner
from nodes.telemetry.thin import MINUTES, thinned
from portal.models import Series
from portal.series import store
from portal.series.codec import POINTS, Points

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


@dataclass
class StoredCluster:
    """Nodes with agents and two GPUs each. `ago` is always the time before NOW."""

    nodes: int = 3
    agents: list[Agent] = field(default_factory=list)
    gpus: list[list[Gpu]] = field(default_factory=list)

    def __post_init__(self) -> None:
        Partition.objects.create(name="gpu")
        for number in range(1, self.nodes + 1):
            name = f"dgx-{number:02}"
            Node.objects.create(name=name, state="idle", partitions=["gpu"], gpus=2)
            agent = Agent.objects.create(node=name)
            self.agents.append(agent)
            self.gpus.append(
                [
                    Gpu.objects.create(uuid=f"GPU-{number}-{i}", agent=agent, index=i, slowdown_c=87, model="H100")
                    for i in range(2)
                ]
            )

    def event(self, kind: str, node: int, ago: timedelta, *, gpu: int | None = 0, **more: Any) -> NodeEvent:
        at = NOW - ago
        about = self.gpus[node][gpu] if gpu is not None else None
        return NodeEvent.objects.create(
            agent=self.agents[node], kind=kind, gpu=about, at=at, **{"last_at": at, **more}
        )  # fmt: skip

    def xid(self, code: int, node: int = 0, *, ago: timedelta, **more: Any) -> NodeEvent:
        return self.event("xid", node, ago, code=code, **{"text": f"code {code}", **more})

    def job(self, number: int, node: int, ago: timedelta, duration: timedelta, gpu: int = 0, **more: Any) -> None:
        Holding.objects.create(
            gpu=self.gpus[node][gpu], agent=self.agents[node], scheduler_id=str(number), since=NOW - ago,
            until=NOW - ago + duration, source="scheduler", **more,
        )  # fmt: skip

    def seconds(self, name: str, values: list[float], ago: timedelta, node: int = 0, gpu: int | None = 0) -> None:
        """Store one value per second."""
        self._store(name, "", np.array(values, np.float64), int((NOW - ago).timestamp()), 1, node, gpu)

    def minutes(
        self, name: str, low: list[float], high: list[float], ago: timedelta, node: int = 0, gpu: int | None = 0
    ) -> None:
        """Store the lowest and highest values of minutes."""
        first = int((NOW - ago).timestamp()) // 60 * 60
        mean = (np.array(low, np.float64) + np.array(high, np.float64)) / 2
        for column, values in (("", mean), (Series.Column.MIN, low), (Series.Column.MAX, high)):
            name_of_level = thinned(name, MINUTES.seconds)
            self._store(name_of_level, column, np.array(values, np.float64), first, 60, node, gpu)

    def _store(self, name: str, column: str, values: Any, first: int, pace: int, node: int, gpu: int | None) -> None:
        owner = host_owner(self.agents[node].pk) if gpu is None else gpu_owner(self.gpus[node][gpu].pk)
        series = store.declare(owner, [name], column=column)[name]
        step = first + pace * np.arange(len(values), dtype=np.int64)
        rows = [
            store.merged_row(series, 0, 0, Points(part, np.full(len(part), float(part[0])), values[i : i + POINTS]))
            for i in range(0, len(step), POINTS)
            if len(part := step[i : i + POINTS])
        ]
        store.insert(rows)
