"""A machine with jobs that hold its GPUs, for tests of waste: agents' reports and a queue."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from jobs.models import Job
from nodes.models import Agent, Holding, QueuedJob
from nodes.telemetry import allocations
from portal.models import User
from tests.lab import a_job, a_project
from tests.nodes.telemetry.reporting import UUIDS, Machine

HOUR_S = 3600


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def machine(gpus: int = 2, *, node: str = "dgx-01", **columns: Any) -> Machine:
    """Return a machine that has just reported."""
    created = Machine(node=node, gpus=tuple(f"{node}-{uuid}" for uuid in UUIDS[:gpus]))
    created.post(created.facts(time.time()))
    works(created, columns.get("gpu_percent", 0))
    return created


def works(made: Machine, percent: Any, *, ago_s: float = 10) -> None:
    """Report ten seconds of utilisation: one number for all GPUs, or a number for each."""
    rows = percent if isinstance(percent, int) else [[item] * 10 for item in percent]
    assert made.post(made.batch(int(time.time() - ago_s), gpu_percent=rows)).status_code == 200


def allocated_job(
    scheduler_id: str, indices: list[int], *, node: str = "dgx-01", hours: float = 14, **more: Any
) -> QueuedJob:
    """Add a job to the queue that has had these GPUs for `hours`."""
    fields = {
        "name": f"job-{scheduler_id}", "user": "mira", "state": "running", "nodes": [node], "gpus": len(indices),
        "gpu_indices": {node: indices}, "started_at": moment(time.time() - hours * HOUR_S),
    }  # fmt: skip
    job = QueuedJob.objects.create(scheduler_id=scheduler_id, **fields | more)
    allocations.update()
    return job


def idle_for(made: Machine, hours: float, *gpus: int) -> None:
    """Pretend that the agent has reported only zeros for so long, for these GPUs or for all."""
    agent = Agent.objects.get(pk=made.agent.pk)
    since = time.time() - hours * HOUR_S
    for place in gpus or range(len(made.gpus)):
        agent.newest["gpus"][made.gpus[place]]["quiet_since"] = since
    agent.save(update_fields=["newest"])


def vigils(owner: User, scheduler_id: str, **fields: Any) -> Job:
    """Create a running job of Vigil's with this scheduler id."""
    return a_job(
        owner,
        a_project(fields.pop("project", "default")),
        state=fields.pop("state", "running"),
        attempt={
            "scheduler_id": scheduler_id,
            "submitted_at": moment(time.time() - 15 * HOUR_S),
            "started_at": moment(time.time() - 14 * HOUR_S),
            **fields.pop("attempt", {}),
        },
        **fields,
    )


def ends(scheduler_id: str) -> None:
    """Remove the job from the scheduler's queue."""
    QueuedJob.objects.filter(scheduler_id=scheduler_id).delete()
    allocations.update()
    assert not Holding.objects.filter(scheduler_id=scheduler_id, until=None).exists()
