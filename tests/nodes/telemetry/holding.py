"""Machines, queued jobs and processes, for tests of which job holds which GPU."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from nodes.models import QueuedJob
from tests.nodes.telemetry.reporting import UUIDS, Machine


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def queued(scheduler_id: str, node: str = "dgx-01", indices: list[int] | None = None, **more: Any) -> QueuedJob:
    fields = {
        "name": f"job-{scheduler_id}", "user": "mira", "state": "running", "nodes": [node], "gpus": len(indices or ()),
        "gpu_indices": {node: indices} if indices else {}, "started_at": moment(time.time() - 3600),
    }  # fmt: skip
    return QueuedJob.objects.create(scheduler_id=scheduler_id, **fields | more)


def four() -> Machine:
    machine = Machine(gpus=UUIDS[:4])
    machine.post(machine.facts(time.time()), machine.batch(int(time.time()) - 10, gpu_percent=50))
    return machine


def process(machine: Machine, gpu: int, job: str, **more: Any) -> dict[str, Any]:
    batch = machine.batch(int(time.time()) - 10, gpu_percent=50)
    payload = {"gpu": UUIDS[gpu], "pid": 17, "user": "mira", "name": "python", "memory_mib": 5, "job": job}
    return {**batch, "processes": [{**payload, **more}]}
