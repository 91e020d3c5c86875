"""Test the page of a job that sbatch started: what Vigil knows of it, without features of Vigil's own jobs."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Job
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.lab import a_job

pytestmark = pytest.mark.django_db
RESOURCES = {
    "nodes": 2, "gpus_per_node": 4, "gpu_type": "h100", "cpus_per_node": 8, "memory_gib": 2.0, "time_limit": "01:30:00",
    "partition": "batch",
}  # fmt: skip
OURS = ("Resume", "Clone", "No checkpoints", "Logs", "spec.toml", "vigil submit", "last checkpoint", "Rank")


def outside(owner: User, project: Project, state: str, *, spec: dict[str, Any] | None = None, **attempt: Any) -> Job:
    payload = {"command": "srun python train.py", "directory": "/home/mira/run"}
    details = {"kind": "attached", "resources": RESOURCES, **payload}
    slurm = {"scheduler_id": "77", "scheduler_user": "mira", "submitted_at": timezone.now()}
    given = {**slurm, "nodes": ["dgx-01", "dgx-02"]}
    return a_job(
        owner, project, state=state, kind=Job.ATTACHED, spec=details if spec is None else spec, name="plain",
        spec_toml="# Started with sbatch outside Vigil, which follows it.\n", attempt={**given, **attempt},
    )  # fmt: skip


@pytest.mark.parametrize("state", ["pending", "running", "completed", "failed", "cancelled"])
@pytest.mark.parametrize("tab", ["", "/life", "/attempts", "/spec", "/spec?show=all"])
def test_it_shows_what_there_is_and_nothing_else(
    client: Client, mira: User, project: Project, state: str, tab: str
) -> None:
    job = outside(mira, project, state, step=7 if state == "running" else None)
    html = text(client.get(f"/jobs/{job.pk}{tab}"))
    assert not [word for word in OURS if word in html]
    if tab in {"", "/spec", "/spec?show=all"}:
        assert "Started with sbatch outside Vigil, which follows it." in html
        assert "2, each with 4 h100 GPUs, 8 CPUs, 2 GiB" in html
        assert "srun python train.py" in html
        assert "/home/mira/run" in html


@pytest.mark.parametrize("state", ["pending", "running", "failed"])
def test_few_details_are_available_at_first(client: Client, mira: User, project: Project, state: str) -> None:
    spec = {"kind": "attached", "project": "default", "tags": []}
    job = outside(mira, project, state, spec=spec, nodes=[])
    assert "<dd>77 of mira</dd>" in text(client.get(f"/jobs/{job.pk}"))
    assert "needs" not in text(client.get("/jobs"))
    assert client.get(f"/jobs/{job.pk}/logs").status_code == 200
    assert "its output is where that put it" in text(client.get(f"/jobs/{job.pk}/logs"))
    assert client.get(f"/jobs/{job.pk}/checkpoints").status_code == 200


def test_the_list_and_home_count_its_nodes(client: Client, mira: User, project: Project) -> None:
    resources = {**RESOURCES, "gpus_per_node": 0}
    outside(mira, project, "pending", spec={"kind": "attached", "resources": resources})
    assert "needs 2 nodes" in text(client.get("/jobs?kind=attached"))
    assert client.get("/").status_code == 200


def test_it_is_not_cloned_nor_resumed(client: Client, mira: User, project: Project) -> None:
    job = outside(mira, project, "completed")
    assert client.get(f"/submit?from={job.pk}").status_code == 404
    answer = client.post(f"/jobs/{job.pk}/resume", {}, follow=True)
    assert f"Not resumed. sbatch started #{job.pk}, not Vigil" in text(answer)


def test_cancelling_it_explains_who_ends_it(client: Client, mira: User, project: Project) -> None:
    job = outside(mira, project, "running")
    assert "Slurm will end it." in text(client.post(f"/jobs/{job.pk}/cancel", follow=True))


def test_a_refused_claim_is_shown_with_its_reason(client: Client, mira: User, project: Project) -> None:
    why = "Slurm has no job 77 of yours. `squeue --me` lists them."
    facts: dict[str, Any] = {"reason": why, "cause": "rejected", "submitted_at": None, "nodes": [], "started_at": None}
    job = outside(mira, project, "failed", spec={"kind": "attached"}, **facts)
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Not attached." in html
    assert "Slurm has no job 77 of yours." in html
    assert "What to do:" not in html
