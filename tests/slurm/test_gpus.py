"""Test which job holds which GPU on a real Slurm: real agents, stand-ins of NVML, jobs that share a node.

Here Slurm makes no control groups (proctrack/linuxproc, as in a container), so processes are attributed by their
environment; attribution by control groups is tested in tests/nodes/agent/gpus/test_processes.py.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.machine import Machine
from tests.slurm.people import ALICE, BOB
from tests.slurm.portal import Person, Portal, portal_on, script
from tests.stack import REPOSITORY
from tests.waiting import until

SHARED, CROSSED = "dgx01", "dgx02"
GPUS = 8


class GpuNodes:
    """The Slurm nodes that run agents, and what the portal shows of their GPUs."""

    def __init__(self, portal: Portal, slurm: Cluster) -> None:
        self.portal, self.slurm = portal, slurm
        self.folder = Path(tempfile.mkdtemp(prefix="vigil-gpus-", dir=slurm.layout.scratch))
        self.folder.chmod(0o755)
        self.sysadmin = portal.client()
        self.browser = httpx.Client(follow_redirects=True, timeout=30, trust_env=False)
        self.shared = Machine(portal, self.folder, SHARED, range(GPUS))
        self.crossed = Machine(portal, self.folder, CROSSED, range(GPUS - 1, -1, -1))

    def open(self) -> None:
        """Start the agents: one with its own token, the other with a shared secret."""
        self.shared.start(self._post(f"nodes/{SHARED}/token")["token"])
        self.crossed.start(self._post("agents/secret")["secret"])
        self.portal.sign_in(self.browser)

    def close(self) -> None:
        for machine in (self.shared, self.crossed):
            machine.close()
        self.sysadmin.close()
        self.browser.close()
        shutil.rmtree(self.folder)

    def _post(self, path: str) -> dict[str, Any]:
        answer = self.sysadmin.post(f"{self.portal.url}/api/v1/{path}")
        assert answer.status_code < 300, answer.text
        return dict(answer.json())

    def _get(self, path: str) -> Any:
        return self.sysadmin.get(f"{self.portal.url}/api/v1/{path}").json()

    def gpus(self, node: str) -> list[dict[str, Any]]:
        return list(self._get(f"nodes/{node}/gpus").get("items", ()))

    def holders(self, node: str) -> dict[str, list[str]]:
        """Return jobs by UUID, of allocated GPUs."""
        return {
            gpu["uuid"]: [holder["scheduler_id"] for holder in gpu["holders"]]
            for gpu in self.gpus(node)
            if gpu["holders"]
        }

    def assignment(self, machine: Machine, minor: int) -> tuple[int | None, str, str]:
        """Return who has a GPU, and the source of that."""
        (gpu,) = (gpu for gpu in self.gpus(machine.node) if gpu["uuid"] == machine.uuid(minor))
        (holder,) = gpu["holders"]
        return holder["job"], holder["user"], holder["source"]

    def processes(self, machine: Machine, minor: int) -> list[dict[str, Any]]:
        (gpu,) = (gpu for gpu in self.gpus(machine.node) if gpu["uuid"] == machine.uuid(minor))
        return list(gpu["processes"])

    def wait_for(self, machine: Machine, jobs: Mapping[str, Sequence[int]]) -> None:
        """Wait until these jobs hold these GPUs (by minor number) of a machine, and nobody holds any other."""
        wanted = {machine.uuid(minor): [job] for job, minors in jobs.items() for minor in minors}
        try:
            until(lambda: self.holders(machine.node) == wanted, f"{wanted} to be allocated")
        except AssertionError as error:
            raise AssertionError(f"{error}; held are {self.holders(machine.node)}") from None

    def page(self, job_id: int) -> set[tuple[str, int]]:
        """Return the GPUs in the table of a job's page for a sysadmin, by node and NVML's number."""
        html = self.browser.get(f"{self.portal.url}/jobs/{job_id}/gpus").text
        return {(node, int(gpu)) for node, gpu in re.findall(r'href="/nodes/([^"]+)">[^<]+</a></td><td>(\d+)', html)}

    def queued(self, scheduler_id: str) -> dict[str, Any]:
        items = self._get("queue?limit=100")["items"]
        return next((item for item in items if item["scheduler_id"] == scheduler_id), {"state": "", "gpu_indices": {}})

    def sbatch(self, user: str, node: str, *options: str, command: str = "exec sleep 600") -> str:
        words = ("--parsable", "--output=/dev/null", "--time=10", f"--nodelist={node}", *options, f"--wrap={command}")
        return self.slurm.run("sbatch", *words, user=user).strip()

    def started(self, user: str, node: str, *options: str) -> str:
        """Return a job that runs: of two that wait, Slurm may start the younger first, on the other job's GPUs."""
        job = self.sbatch(user, node, *options)
        until(lambda: self.slurm.run("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING", f"{job} to run")
        return job


@pytest.fixture(scope="module")
def portal(slurm: Cluster) -> Iterator[Portal]:
    with portal_on(slurm, VIGIL_AGENT="no") as created:
        yield created


@pytest.fixture(scope="module")
def gpu_nodes(portal: Portal, slurm: Cluster) -> Iterator[GpuNodes]:
    created = GpuNodes(portal, slurm)
    try:
        created.open()
        until(lambda: all(len(created.gpus(node)) == GPUS for node in (SHARED, CROSSED)), "the agents to report")
        yield created
    finally:
        created.close()


@pytest.fixture(autouse=True)
def idle(slurm: Cluster, gpu_nodes: GpuNodes) -> Iterator[None]:
    """Check that nothing runs before a test and after it."""
    yield
    for user in (ALICE, BOB):
        slurm.run("scancel", f"--user={user}")
    slurm.wait_for(lambda: slurm.idle() == len(slurm.layout.names), "every node to be idle")


def submitted(person: Person, project: str, **environment: str) -> tuple[int, str]:
    """Submit a job on two GPUs of the shared node; return its number and Slurm's."""
    spec = script(1_000_000, gpus_per_node=2, ranks_per_node=1, constraint=SHARED) | {
        "project": project,
        "environment": environment,
    }
    job_id = person.submit(spec)
    return job_id, str(person.wait_for_step(job_id, 1)["attempt"]["scheduler_id"])


def runs_again(queued: dict[str, Any]) -> bool:
    return (queued["state"], queued.get("restart_count")) == ("running", 1)


def rows(person: Person, job_id: int) -> dict[tuple[int, str], set[float]]:
    """Return what the page of a job's GPUs shows: all values of each, by attempt and UUID."""
    payload = person.client.get(f"/jobs/{job_id}/gpus", params={"columns": 2000}).json()
    assert payload["source"] in {"agent", ""}
    return {
        (row["attempt"], row["uuid"]): {value for value in row["mean"] if value is not None} for row in payload["items"]
    }


def percent_by_gpu(machine: Machine, attempt: int, *minors: int) -> dict[tuple[int, str], set[float]]:
    return {(attempt, machine.uuid(minor)): {float(machine.percent(minor))} for minor in minors}


def test_gpus_belong_to_their_processes(gpu_nodes: GpuNodes, slurm: Cluster, alice: Person, bob: Person) -> None:
    shared, crossed = gpu_nodes.shared, gpu_nodes.crossed
    # Alice's launcher queries NVML itself; bob's finds none, as in many containers.
    first, first_id = submitted(alice, "vision", python=shared.python())
    second, second_id = submitted(bob, "speech")
    foreign = gpu_nodes.started(BOB, SHARED, "--gres=gpu:1")
    plain = gpu_nodes.started(ALICE, CROSSED, "--gres=gpu:2")
    on_both = gpu_nodes.started(ALICE, f"{SHARED},{CROSSED}", "--nodes=2", "--gres=gpu:1")
    array = gpu_nodes.sbatch(BOB, CROSSED, "--gres=gpu:1", "--array=0-1")
    process = task_of(slurm, array, "0")
    crossed.set_gpus(f"{crossed.minors.index(3)} process {process.pid} 512")
    on_shared = {first_id: [0, 1], second_id: [2, 3], foreign: [4], on_both: [5]}
    on_crossed = {plain: [0, 1], on_both: [2], f"{array}_0": [3], f"{array}_1": [4]}
    gpu_nodes.wait_for(shared, on_shared)
    gpu_nodes.wait_for(crossed, on_crossed)

    until(lambda: rows(alice, first) == percent_by_gpu(shared, 1, 0, 1), "alice's GPUs")
    until(lambda: rows(bob, second) == percent_by_gpu(shared, 1, 2, 3), "bob's GPUs")
    assert bob.client.get(f"/jobs/{first}/gpus").status_code == 404
    assert gpu_nodes.page(first) == {(SHARED, 0), (SHARED, 1)}
    assert gpu_nodes.page(second) == {(SHARED, 2), (SHARED, 3)}
    until(lambda: gpu_nodes.assignment(shared, 0) == (first, "alice", "launcher"), "the launcher's word")
    assert gpu_nodes.assignment(shared, 2) == (second, "bob", "scheduler")
    assert gpu_nodes.assignment(shared, 4) == (None, BOB, "scheduler"), "a job that Vigil knows nothing of"
    newest = {gpu["uuid"]: gpu["newest"]["gpu_percent"] for gpu in gpu_nodes.gpus(CROSSED)}
    assert [newest[crossed.uuid(minor)] for minor in (0, 7)] == [80, 10], "the last of NVML's is Slurm's first"
    # A user is a number until the agent has the name, and a number's claim to a job is not believed.
    owners = [(BOB, process.environ()["SLURM_JOB_ID"])]
    until(
        lambda: [(item["user"], item["job"]) for item in gpu_nodes.processes(crossed, 3)] == owners,
        "the task's process",
    )
    assert owners != [(BOB, f"{array}_0")], "a number that the queue does not have"

    # A suspended job keeps its GPUs, a requeued one gets GPUs again, and jobs that end release theirs.
    slurm.run("scontrol", "suspend", foreign)
    slurm.run("scontrol", "requeue", second_id)
    slurm.run("scancel", plain, on_both)
    alice.cancel(first)
    until(lambda: len(bob.attempts(second)) == 2, "bob's second attempt")
    until(lambda: runs_again(gpu_nodes.queued(second_id)), "where it runs now")
    (minors,) = gpu_nodes.queued(second_id)["gpu_indices"].values()
    gpu_nodes.wait_for(shared, {second_id: minors, foreign: [4]})
    gpu_nodes.wait_for(crossed, {f"{array}_0": [3], f"{array}_1": [4]})
    assert gpu_nodes.queued(foreign)["state"] == "suspended"
    both = percent_by_gpu(shared, 1, 2, 3) | percent_by_gpu(shared, 2, *minors)
    until(lambda: rows(bob, second) == both, "the GPUs of both attempts")
    assert rows(alice, first) == percent_by_gpu(shared, 1, 0, 1), "they are still listed"
    bob.cancel(second)
    slurm.run("scancel", foreign, array)
    gpu_nodes.wait_for(shared, {})
    gpu_nodes.wait_for(crossed, {})


def task_of(slurm: Cluster, array: str, task: str) -> psutil.Process:
    """Return the process of an array task, once it runs; other clusters on this machine have the same numbers."""
    wanted = (array, task, str(slurm.layout.scratch))

    def poll() -> psutil.Process | None:
        for process in psutil.process_iter():
            try:
                found = process.environ() if process.name() == "sleep" else {}
            except psutil.Error:
                continue
            names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_SUBMIT_DIR")
            if tuple(found.get(name) for name in names) == wanted:
                return process
        return None

    found = until(poll, f"task {task} of {array} to run")
    assert found is not None
    return found


def documented(environment: Path, agent: Path) -> str:
    """Return the script for HealthCheckProgram from docs/how-to/agent.md."""
    text = (REPOSITORY / "docs" / "how-to" / "agent.md").read_text()
    (found,) = re.findall(r"```sh\n(#!/bin/sh\n[^`]*State=DRAIN[^`]*)```", text)
    here = {"/etc/vigil-agent/environment": environment, "/opt/vigil-agent.pyz": agent}
    assert all(path in found for path in here)
    return re.sub("|".join(here), lambda match: str(here[match[0]]), found)


def test_the_check_as_health_check_program(gpu_nodes: GpuNodes, slurm: Cluster) -> None:
    """It drains nothing while all is well, and a node whose GPU is lost, once; others' reasons stay."""
    machine = Machine(gpu_nodes.portal, gpu_nodes.folder, "dgx03", range(GPUS))
    environment, program = machine.folder / "environment", machine.folder / "check"
    variables = {**machine.environment, "SLURM_CONF": slurm.layout.slurm_conf, "PATH": "/usr/bin:/bin"}
    environment.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    folder = Path(f"{environment}.output")
    only_there = f'#!/bin/sh\n[ "$SLURMD_NODENAME" = {machine.node} ] || exit 0\n'
    agent = f"{sys.executable} -P -m nodes.agent"
    agent_script = (
        f'#!/bin/sh\ncd {REPOSITORY}\noutput=$({agent} "$@")\ncode=$?\necho "$output" | tee -a {folder}\nexit $code\n'
    )
    pyz = Path(f"{environment}.pyz")
    for path, text in ((program, documented(environment, pyz).replace("#!/bin/sh\n", only_there)), (pyz, agent_script)):
        path.write_text(text)
        path.chmod(0o755)

    def reason() -> str:
        found = re.search(r"Reason=(.*?) \[", slurm.run("scontrol", "show", "node", machine.node))
        return found[1] if found else ""

    with slurm.configured(f"HealthCheckProgram={program}", "HealthCheckInterval=2"):
        until(lambda: folder.exists() and folder.read_text().count("is healthy: 8 GPUs respond.") >= 2, "two checks")
        assert (reason(), slurm.idle()) == ("", len(slurm.layout.names))
        machine.set_gpus("2 lost 1")
        until(reason, "the node to be drained")
        assert reason().startswith("HC: GPU 2 ("), reason()
        slurm.run("scontrol", "update", f"NodeName={machine.node}", "State=RESUME")
        slurm.run("scontrol", "update", f"NodeName={machine.node}", "State=DRAIN", "Reason=fan")
        count = folder.read_text().count("\n")
        until(lambda: folder.read_text().count("\n") >= count + 2, "two more checks")
        assert reason() == "fan"
        machine.set_gpus()  # else a check that runs now would drain the node again
        healthy = folder.read_text().count("is healthy")
        until(lambda: folder.read_text().count("is healthy") > healthy, "a check that finds nothing")
    slurm.run("scontrol", "update", f"NodeName={machine.node}", "State=RESUME")
    slurm.wait_for(lambda: slurm.idle() == len(slurm.layout.names), "every node to be idle")
