"""What a user's job left behind drains the node as the user's problem, which ends by itself with the processes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from nodes.cluster import sync
from nodes.models import HealthEntry, Reading
from tests.nodes.remediation.cluster import Lab

pytestmark = pytest.mark.django_db


def processes(lab: Lab, *jobs: str) -> None:
    """Let dgx-01's agent report a process of each job on its first GPU."""
    machine = lab.machine()
    rows = [
        {"gpu": machine.gpus[0], "pid": 100 + number, "user": "ada", "name": "python", "job": job}
        for number, job in enumerate(jobs)
    ]
    batch = machine.batch(int(time.time()) - 10 + machine.next, n=1, gpu_percent=0)
    assert machine.post({**batch, "processes": rows}).status_code == 200


def test_processes_of_an_ended_job_drain_and_return_by_themselves(lab: Lab) -> None:
    processes(lab, "17")
    lab.later(0)
    assert not lab.scheduler.drained, "a job may still clean up"
    lab.later(5.1)
    assert lab.scheduler.drained == {
        "dgx-01": "[user] Processes of ended jobs are left on GPUs (vigil: leftover-processes)"
    }
    lab.later(8)
    assert lab.scheduler.drained
    processes(lab)
    lab.later(9)
    lab.later(11)
    assert not lab.scheduler.drained
    assert not HealthEntry.objects.active().exists()


def test_processes_of_jobs_that_run_are_no_finding(lab: Lab) -> None:
    lab.scheduler.machines = [replace(machine, state="mixed", cpus_used=8) for machine in lab.scheduler.machines]
    sync.read(lab.scheduler, Reading.Part.NODES)
    processes(lab, "17", "18")
    lab.later(0)
    lab.later(6)
    assert not HealthEntry.objects.exists()


def test_processes_without_a_job_are_no_finding(lab: Lab) -> None:
    processes(lab, "")
    lab.later(0)
    lab.later(6)
    assert not HealthEntry.objects.exists()
