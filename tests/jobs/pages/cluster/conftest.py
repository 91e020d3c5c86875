"""Provide a small cluster with a queue for the tests of its pages."""

from __future__ import annotations

import pytest
from django.utils import timezone

from nodes.cluster import sync
from nodes.schedulers.cluster import PartitionInfo
from portal.models import User
from tests.jobs.pages.cluster.reading import HOUR_S, node, queued
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_job, a_project, person


@pytest.fixture
def mira() -> User:
    return person("mira", a_project(), slurm_user="mira1")


@pytest.fixture
def scheduler(mira: User) -> ScriptedScheduler:
    """Return a cluster on which mira runs a job of Vigil's (#11), and somebody else another (#12)."""
    a_job(mira, a_project(), name="wren", state="running", attempt={"scheduler_id": "11"})
    scheduler = ScriptedScheduler(
        machines=[
            node("dgx-01", gpus_used=6, gpus_allocated=(0, 1, 2, 3, 4, 5), features=("nvlink",)),
            node("dgx-02", "drained", reason="XID 79", reason_by="ops"),
            node("cpu-01", "idle", gpus=0, partitions=("cpu",)),
        ],
        queued=[
            queued(11, state="running", user="mira1", nodes=("dgx-01",), gpu_indices={"dgx-01": (0, 1, 2, 3)}),
            queued(12, state="running", user="oskar9", nodes=("dgx-01",), gpu_indices={"dgx-01": (4, 5)}),
            queued(13, priority=50, reason="Resources", starts_at=timezone.now().timestamp() + HOUR_S),
            queued(14, priority=90, reason="QOSMaxGRESPerUser", partition="cpu,gpu"),
            queued(15, priority=70, reason="Priority", user="mira1"),
            queued(16, reason="JobHeldAdmin"),
        ],
        divided=[
            PartitionInfo(name="gpu", is_default=True, max_time_s=24 * HOUR_S),
            PartitionInfo(name="cpu", state="drain"),
        ],
    )
    sync.read(scheduler)
    return scheduler
