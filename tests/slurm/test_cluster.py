"""The private clusters themselves: jobs on several nodes and of several people, REST, lost daemons, nothing left."""

from __future__ import annotations

import subprocess
import time

import httpx
import psutil
import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB
from tests.slurm.release import CHECKOUT

SERVED = {"22.05": ["v0.0.36", "v0.0.37", "v0.0.38"], "24.11": ["v0.0.40", "v0.0.41", "v0.0.42"]}


def batch(slurm: Cluster, script: str, *options: str, user: str = "") -> str:
    """What a job wrote, after its end."""
    output = slurm.layout.scratch / f"{time.monotonic_ns()}.out"
    slurm.run(
        "sbatch", "--wait", "--mem=1000", f"--output={output}", *options, stdin=f"#!/bin/bash\n{script}\n", user=user
    )
    return output.read_text()


def test_the_commands_are_the_release_s(slurm: Cluster, release: str) -> None:
    assert slurm.run("sinfo", "--version").startswith(f"slurm-wlm {release}.")
    from_outside = subprocess.check_output(["sinfo", "--version"], env=slurm.environment, text=True)
    assert from_outside == slurm.run("sinfo", "--version")


def test_a_job_gets_gpus_on_two_nodes(slurm: Cluster) -> None:
    script = "srun --ntasks-per-node=1 bash -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'"
    output = batch(slurm, script, "--nodes=2", "--gres=gpu:h100:2")
    assert sorted(output.splitlines()) == ["dgx01 0,1", "dgx02 0,1"]


def test_a_job_is_its_owner_and_has_our_python_with_torch(slurm: Cluster) -> None:
    python = CHECKOUT / ".venv" / "bin" / "python"
    script = f"id -un; {python} -c 'import ssl, sqlite3, torch; print(torch.ones(4).sum().item())'"
    assert batch(slurm, script, user=ALICE).splitlines() == [ALICE, "4.0"]
    assert slurm.run("sacct", "-nX", "-u", ALICE, "--format=account%20").split()[-1] == "vision"


def test_limits_hold(slurm: Cluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--qos=small", "--gres=gpu:h100:3", stdin="#!/bin/bash\ntrue\n", user=BOB)
    slurm.wait_for(lambda: "QOSMaxGRESPerUser" in slurm.run("squeue", "-h", "-j", job.strip(), "-o%r"), "its limit")
    slurm.run("scancel", job.strip(), user=BOB)


@pytest.mark.parametrize("way", ["TCP", "socket"])
def test_rest_serves_its_versions_to_whom_it_knows(slurm: Cluster, release: str, way: str) -> None:
    who = {"X-SLURM-USER-NAME": ALICE, "X-SLURM-USER-TOKEN": slurm.token(ALICE)}
    transport = httpx.HTTPTransport(uds=str(slurm.socket)) if way == "socket" else None
    with httpx.Client(base_url=slurm.url, transport=transport, trust_env=False, timeout=20) as client:
        paths = client.get("/openapi/v3", headers=who).json()["paths"]
        assert sorted({path.split("/")[2] for path in paths if path.startswith("/slurm/v")}) == SERVED[release]
        for version in SERVED[release]:
            nodes = client.get(f"/slurm/{version}/nodes", headers=who).json()["nodes"]
            assert [node["name"] for node in nodes] == slurm.layout.names
        assert client.get(f"/slurm/{version}/nodes").status_code == 401


@pytest.mark.parametrize("name", ["slurmrestd", "slurmdbd", "slurmctld", "dgx02"])
def test_a_daemon_can_be_killed_and_comes_back(slurm: Cluster, name: str) -> None:
    old = slurm.daemons[name].pid
    with slurm.without(name):
        assert not psutil.pid_exists(old)
    assert slurm.daemons[name].pid != old
    slurm.wait_for(lambda: slurm.idle() == 4, "every node to be idle again")
