"""A burn-in on a simulated cluster: the test acts as the nodes, which write results, and as the scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from jobs.burnins.start import start
from jobs.disk import rundir
from jobs.following import follow
from nodes.cluster import sync
from nodes.models import BurnIn, BurnInNode, Reading
from nodes.schedulers.base import SchedulerError
from portal.models import User
from tests.nodes.remediation.cluster import Lab

H100 = "NVIDIA H100, torch 2.13, CUDA 13.0"
GOOD, BAD = "a" * 64, "b" * 64


def line(test: str, item: str, **more: Any) -> dict[str, Any]:
    """Return one result as the program on the node writes it."""
    return {"at": time.time(), "test": test, "item": item, "outcome": "passed", "basis": H100, **more}


def good_lines(gpus: int = 2) -> list[dict[str, Any]]:
    found = [{"index": index, "model": "NVIDIA H100"} for index in range(gpus)]
    lines = [line("facts", "this node", gpus=found, driver="570.1", torch="2.13", cuda="13.0", cpu="Xeon")]
    for gpu in range(gpus):
        lines.append(line("memory", f"GPU {gpu}"))
        lines.append(line("matrix", f"GPU {gpu}", value=700.0, unit="TFLOP/s", digest=GOOD))
        lines.append(line("copy", f"host to GPU {gpu}", value=24.8, unit="GB/s"))
        lines.append(line("copy", f"GPU {gpu} to host"))
    lines += [line("copy", f"GPU {source} to GPU {target}") for source, target in permutations(range(gpus), 2)]
    others = (("all-reduce", f"{gpus} GPUs"), ("host memory", "memory"), ("disk", "write /tmp"), ("disk", "read /tmp"))
    return [*lines, *(line(test, item) for test, item in others), line("end", "this node")]


@dataclass
class SimulatedCluster:
    """Act as the nodes and the scheduler of one burn-in."""

    lab: Lab
    user: User
    burn_in: BurnIn = field(default_factory=BurnIn)

    def start(self, *nodes: str, seconds: int = 60, **options: Any) -> BurnIn:
        self.burn_in = start(self.user, nodes or ("dgx-01",), seconds, **options)
        return self.burn_in

    def tick(self, times: int = 1) -> BurnIn:
        for _ in range(times):
            BurnIn.objects.filter(pk=self.burn_in.pk).exclude(state="running").update(tried_at=None)
            follow.tick(self.lab.scheduler)
            self.read_nodes()
        self.burn_in.refresh_from_db()
        return self.burn_in

    def read_nodes(self) -> None:
        sync.read(self.lab.scheduler, Reading.Part.NODES)

    def until(self, condition: Callable[[BurnIn], bool]) -> BurnIn:
        for _ in range(10):
            if condition(self.tick()):
                return self.burn_in
        raise AssertionError(f"{self.burn_in.state}: {self.burn_in.detail} {self.burn_in.problem}")

    def until_running(self) -> BurnIn:
        self.until(lambda burn_in: burn_in.state == "running")
        # Whole seconds, as Slurm reports: maybe before the finding that led to the burn-in.
        self.lab.scheduler.update_job(self.burn_in.scheduler_id, state="running", started_at=int(time.time()) - 1)
        return self.tick()

    def until_ended(self) -> BurnIn:
        return self.until(lambda burn_in: burn_in.state == "ended")

    def write(self, lines: list[dict[str, Any]], node: str = "dgx-01") -> None:
        self.write_bytes("".join(json.dumps(each) + "\n" for each in lines).encode(), node)

    def write_bytes(self, data: bytes, node: str = "dgx-01") -> None:
        folder = rundir.path_of(self.burn_in.directory) / "job" / "results"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{node}.jsonl", "ab") as file:
            file.write(data)

    def end_job(self, state: str = "completed") -> None:
        """End the job; what nodes wrote counts as complete at once."""
        self.lab.scheduler.update_job(self.burn_in.scheduler_id, state=state)
        self.tick()
        BurnIn.objects.filter(pk=self.burn_in.pk).update(job_ended_at="2026-01-01T00:00Z")

    def set_node(self, name: str = "dgx-01", **changes: Any) -> None:
        machines = self.lab.scheduler.machines
        self.lab.scheduler.machines = [replace(m, **changes) if m.name == name else m for m in machines]
        self.read_nodes()

    def row(self, node: str = "dgx-01") -> BurnInNode:
        return self.burn_in.nodes.get(node=node)

    def texts(self, node: str = "dgx-01") -> list[str]:
        return [finding["text"] for finding in self.row(node).findings]


def away() -> SchedulerError:
    return SchedulerError("no answer within 10 s")
