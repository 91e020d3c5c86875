"""Test the private clusters: jobs on several nodes and of several people, REST, lost daemons, a clean end."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.slurm import room
from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB, PORTAL, People
from tests.slurm.release import CHECKOUT
from tests.waiting import until

SERVED = {
    "22.05": ["v0.0.36", "v0.0.37", "v0.0.38"],
    "24.11": ["v0.0.40", "v0.0.41", "v0.0.42"],
    "26.05": ["v0.0.42", "v0.0.43", "v0.0.44", "v0.0.45"],
}
SLEEP = "#!/bin/bash\nsleep 600\n"
# A separate cluster with a running job, which ends with its standard input.
ANOTHER = f"""
import json, sys
from tests.slurm.cluster import cluster
with cluster(sys.argv[1], nodes=1) as slurm:
    started = slurm.layout.scratch / "started"
    script = f"#!/bin/bash\\nsetsid sh -c 'touch {{started}}; sleep 600' & wait"
    slurm.run("sbatch", "--output=/dev/null", stdin=script, user="{ALICE}")
    slurm.wait_for(started.exists, "a job to run")
    print(json.dumps([slurm.room.mark, str(slurm.layout.folder)]), flush=True)
    sys.stdin.read()
"""


def batch(slurm: Cluster, script: str, *options: str, user: str = "") -> str:
    """Return what a job wrote, after its end."""
    output = slurm.layout.scratch / f"{time.monotonic_ns()}.out"
    words = ["sbatch", "--parsable", "--mem=1000", f"--output={output}", *options]
    job = slurm.run(*words, stdin=f"#!/bin/bash\n{script}\n", user=user).strip()
    slurm.wait_for(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"job {job} to end")
    assert slurm.state(job) == "COMPLETED"
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
    slurm.wait_for(lambda: "vision" in slurm.run("sacct", "-nX", "-u", ALICE, "--format=account%20"), "its accounting")


def test_limits_hold(slurm: Cluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--qos=small", "--gres=gpu:h100:3", stdin=SLEEP, user=BOB).strip()
    slurm.wait_for(lambda: "QOSMaxGRESPerUser" in slurm.run("squeue", "-h", "-j", job, "-o%r"), "its limit")
    slurm.run("scancel", job, user=BOB)


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


@pytest.mark.parametrize("name", ["munged", "mariadbd", "slurmrestd", "slurmdbd", "slurmctld", "dgx02"])
def test_a_daemon_can_be_killed_and_comes_back(slurm: Cluster, name: str) -> None:
    old = slurm.daemons[name].pid
    with slurm.without(name):
        assert not psutil.pid_exists(old)
    assert slurm.daemons[name].pid != old
    assert batch(slurm, "srun hostname")
    slurm.wait_for(lambda: slurm.idle() == 4, "every node to be idle again")


def test_a_job_outlives_its_daemons_and_is_requeued(slurm: Cluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--nodelist=dgx03", stdin=SLEEP, user=BOB).strip()
    slurm.wait_for(lambda: slurm.state(job) == "RUNNING", "the job to run")
    with slurm.without("dgx03", "slurmctld"):
        pass
    assert slurm.state(job) == "RUNNING"
    slurm.run("scontrol", "requeue", job)
    slurm.wait_for(lambda: slurm.state(job) == "PENDING", "the job to wait again")
    slurm.wait_for(lambda: slurm.state(job) == "RUNNING", "the job to run again")
    slurm.run("scancel", job, user=BOB)
    slurm.wait_for(lambda: slurm.idle() == 4, "every node to be idle")


def test_the_portal_may_drain_a_node(slurm: Cluster) -> None:
    slurm.run("scontrol", "update", "nodename=dgx04", "state=drain", "reason=fan", user=PORTAL)
    assert slurm.node_states()[3] == "drained"
    slurm.run("scontrol", "update", "nodename=dgx04", "state=resume", user=PORTAL)
    slurm.wait_for(lambda: slurm.idle() == 4, "the node to be back")


def test_a_hook_hears_of_a_job_s_end(slurm: Cluster) -> None:
    hook, path = slurm.layout.job_ended_hook, slurm.layout.scratch / "heard"
    hook.write_text(f'#!/bin/sh\necho "$JOBSTATE" >>{path}\n')
    hook.chmod(0o755)
    try:
        batch(slurm, "true")
        slurm.wait_for(lambda: path.exists() and "COMPLETED" in path.read_text(), "the hook to be called")
    finally:
        hook.unlink()


def test_people_run_our_python_outside_as_well() -> None:
    people = People()
    code = "import os, json; print(json.dumps([os.getuid(), sorted(os.getgroups())]))"
    output = subprocess.check_output(people.as_user(ALICE, CHECKOUT / ".venv/bin/python", "-c", code), text=True)
    assert json.loads(output) == [people.alice.uid, sorted([people.alice.gid, people.group])]


@pytest.mark.parametrize("end", ["down", "killed"])
def test_nothing_is_left(release: str, end: str) -> None:
    command = [sys.executable, "-c", ANOTHER, release]
    with subprocess.Popen(command, cwd=CHECKOUT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout
        mark, folder = json.loads(maker.stdout.readline())
        there = [psutil.Process(pid) for pid in room.members(mark)]
        programs = {(process.cmdline() or [""])[0].split(":")[0] for process in there}
        assert {"slurmctld", "slurmd", "munged", "slurmstepd"} <= programs
        if end == "killed":
            maker.send_signal(signal.SIGKILL)
        maker.communicate()
    # By process, not by the room's mark: the kernel soon gives that to another room.
    until(lambda: not any(process.is_running() for process in there), "its processes to end")
    until(lambda: not any(names(process, folder) for process in psutil.process_iter()), "all others of its to end")
    assert Path(folder).exists() == (end == "killed")
    shutil.rmtree(folder, ignore_errors=True)


def names(process: psutil.Process, folder: str) -> bool:
    try:
        return folder in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
