"""A scripted scheduler whose drains are in a file, so that they outlive the process that orders them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nodes.schedulers.base import NodeStatus
from nodes.schedulers.cluster import PartitionInfo
from tests.jobs.schedulers import ScriptedScheduler


class ClusterOnDisk(ScriptedScheduler):
    """Has nodes of one partition; every instance on one path shares their state."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        idle = NodeStatus(name="", state="idle", cpus=64, gpus=2, memory_mib=65_536, gpu_type="h100")
        super().__init__(divided=[PartitionInfo(name="gpu", is_default=True, nodes=tuple(names))])
        self.path = path
        self.drained = json.loads(path.read_text()) if path.exists() else {}
        self.machines = [
            replace(
                idle, name=name, partitions=("gpu",), state="drained" if name in self.drained else "idle",
                reason=self.drained.get(name, ""),
            )
            for name in names
        ]  # fmt: skip

    def drain(self, node: str, reason: str) -> None:
        super().drain(node, reason)
        self._store()

    def undrain(self, node: str) -> None:
        super().undrain(node)
        self._store()

    def _store(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.drained))
        part.replace(self.path)
