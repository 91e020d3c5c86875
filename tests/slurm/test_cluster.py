"""The private cluster itself: it runs jobs on several nodes, serves REST, survives its daemons and leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.slurm.cluster import Cluster, cluster


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        yield made
        folder = str(made.layout.folder)
    left = [p.cmdline() for p in psutil.process_iter() if folder in " ".join(p.cmdline())]
    assert not left


def test_a_job_gets_gpus_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsrun --ntasks-per-node=1 bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'\n")
    output = tmp_path / "out"
    slurm.run("sbatch", "--wait", "--nodes=2", "--gres=gpu:h100:2", "--mem=1000", f"--output={output}", script)
    assert sorted(output.read_text().split("\n")[:2]) == ["dgx01 0,1", "dgx02 0,1"]


def test_rest_says_which_versions_it_serves_to_whom_it_knows(slurm: Cluster) -> None:
    who = {"X-SLURM-USER-NAME": "root", "X-SLURM-USER-TOKEN": slurm.token()}
    with httpx.Client(base_url=slurm.url, trust_env=False) as client:
        paths = client.get("/openapi/v3", headers=who).json()["paths"]
        newest = max(path.split("/")[2] for path in paths if path.startswith("/slurm/v0.0."))
        nodes = client.get(f"/slurm/{newest}/nodes", headers=who).json()["nodes"]
        assert [node["name"] for node in nodes] == slurm.layout.names
        assert client.get(f"/slurm/{newest}/nodes").status_code == 401


@pytest.mark.parametrize("name", ["slurmrestd", "slurmdbd", "slurmctld", "dgx02"])
def test_a_daemon_can_be_killed_and_comes_back(slurm: Cluster, name: str) -> None:
    old = slurm.daemons[name].pid
    slurm.kill(name)
    slurm.start(name)
    assert slurm.daemons[name].pid != old
    slurm.wait_for(lambda: slurm.idle() == 4, "every node to be idle again")
