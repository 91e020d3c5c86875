"""Test failures injected on a real Slurm, all at once: what the scheduler reports is diagnosed and decided in time.

What takes the machine's memory or disk, and what our guards find by themselves, is in
tests/portal/test_up_planted.py: Slurm makes no control groups here, and has no say in numbers.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import planted
from tests.endings import Ending, Endings, endings_of
from tests.planted import Planted
from tests.slurm.cluster import Cluster
from tests.slurm.machine import Machine
from tests.slurm.people import ALICE
from tests.slurm.portal import Person, Portal, federated, language
from tests.waiting import until

PATIENCE_S = 240.0
TO_LOSE, TO_PREEMPT, ELSEWHERE = "dgx03", "dgx04", "dgx01|dgx02"  # as features: nodes by name take root's scontrol here
REQUEUED = r"^Requeued; continues as attempt 2\.$"
KILL_WAIT_S = 5.0  # of this cluster's
CLIENTS_FAILED = ("federated.clients", r"^All clients failed .*happen again")
GPU_LOST = ("gpu.off_bus", r"Restarted from the beginning without dgx\d\d as attempt 2")


@dataclass(frozen=True)
class Trained(Planted):
    """Only our own trainer reports every step that it begins."""

    def spec(self, **resources: Any) -> dict[str, Any]:
        stored = {name: part for name, part in super().spec(**resources).items() if name not in ("kind", "script")}
        return {**self.run(), **stored}

    def run(self) -> dict[str, Any]:
        """Return the kind of the run, and what it trains."""
        return language(steps=10**6, checkpoint_every=1_000)


@dataclass(frozen=True)
class Federated(Trained):
    """No client can train: one sample a batch has no deviation to normalise by."""

    def run(self) -> dict[str, Any]:
        return federated(batch=1, tabular={"hidden": 8, "batch_norm": True})


PLANTED = {
    "hung": Trained("hung", *planted.HUNG, rank=1),
    "time limit": Planted("deaf", *planted.TOO_LATE, lingers_s=KILL_WAIT_S),
    "ended by the warning": Planted("endless", *planted.TOO_LATE),
    "exception": replace(planted.EXCEPTION, ranks=2),
    "scancel": planted.CANCELLED,
    "preempted": Planted("for_ever", "", REQUEUED),
    "node lost": Planted("endless", "scheduler.node_fail", REQUEUED),
    "launch": Planted("success", "scheduler.launch", r"Restarted from the beginning without dgx\d\d as attempt 2"),
    "all clients failed": Federated("all-clients", *CLIENTS_FAILED, ranks=1),
    **planted.ANYWHERE,
}
RESOURCES: dict[str, dict[str, Any]] = {
    "hung": {"begin": "+8s"},
    "ended by the warning": {"time_limit": "00:01:00"},
    "exception": {"nodes": 2},
    "preempted": {"exclusive": True, "constraint": TO_PREEMPT},
    "node lost": {"constraint": TO_LOSE},
    "launch": {"begin": "+8s"},
    "gpu lost": {"gpus_per_node": 1, "ranks_per_node": None},
}


@dataclass
class Lab:
    """Alice's jobs by the name of the failure injected into them."""

    portal: Portal
    slurm: Cluster
    alice: Person
    jobs: dict[str, int] = field(default_factory=dict)
    planted: dict[str, Planted] = field(default_factory=dict)
    endings: Endings = field(default_factory=dict)

    def submit(self, name: str, what: Planted) -> None:
        options = {"constraint": ELSEWHERE, **RESOURCES.get(name, {})}
        spec = {**what.spec(**options), "project": "vision"}
        body = {"json": {"spec": spec}} if isinstance(what, Trained) else planted.upload(spec)
        answer = self.alice.client.post("/jobs", **body)
        assert answer.status_code == 201, answer.text
        self.jobs[name], self.planted[name] = int(answer.json()["id"]), what

    def scheduler_id(self, name: str) -> str:
        return str(self.alice.attempts(self.jobs[name])[0]["scheduler_id"])

    def running(self, name: str) -> None:
        """Wait until it has done a few steps."""
        self.alice.wait_for_step(self.jobs[name], 8, PATIENCE_S)

    def decided(self, name: str, number: int = 1) -> None:
        def is_decided() -> bool:
            return any(
                attempt["number"] == number and attempt["decided_at"]
                for attempt in self.alice.attempts(self.jobs[name])
            )

        until(is_decided, f"the decision on attempt {number} of {name}", PATIENCE_S)

    def run_directory(self, name: str) -> Path:
        (found,) = until(lambda: list((self.portal.runs / "vision").glob(f"{self.jobs[name]}-*")), "its folder")
        return Path(found)

    def nodes(self, name: str) -> list[str]:
        return list(self.alice.attempts(self.jobs[name])[0]["nodes"])

    def ending(self, name: str, number: int = 1) -> Ending:
        return self.endings[self.jobs[name], number]


@pytest.fixture(scope="module")
def lab(portal: Portal, slurm: Cluster) -> Iterator[Lab]:
    """Inject all failures, and wait until each attempt has ended and is decided."""
    created = Lab(portal, slurm, portal.as_person("alice"))
    folder = Path(tempfile.mkdtemp(prefix="vigil-planted-", dir=slurm.layout.scratch))
    folder.chmod(0o755)
    try:
        with ExitStack() as machines:
            plant(created, folder, machines)
        created.endings = endings_of(portal)
        yield created
    finally:
        created.alice.client.close()
        slurm.run("scancel", f"--user={ALICE}")
        slurm.wait_for(lambda: slurm.idle() == len(slurm.layout.names), "every node to be idle")
        shutil.rmtree(folder)


def plant(lab: Lab, folder: Path, machines: ExitStack) -> None:
    for name, what in PLANTED.items():
        lab.submit(name, what)
        if name == "hung":
            planted.set_patience(lab.run_directory(name))
        if name == "launch":
            block_output(lab, name)
    lost = folder / "lost"
    lab.submit("gpu lost", Planted("gpu_lost", *GPU_LOST, words=(str(lost),)))
    lab.running("scancel")
    lab.slurm.run("scancel", lab.scheduler_id("scancel"))
    lab.running("preempted")
    urgent = ("--partition=urgent", f"--nodelist={TO_PREEMPT}", "--exclusive", "--time=1", "--wrap=sleep 1")
    lab.slurm.run("sbatch", *urgent, user=ALICE)
    lab.running("time limit")
    # Not "now": 26.05 refuses a time that is over when the request arrives.
    lab.slurm.run("scontrol", "update", f"JobId={lab.scheduler_id('time limit')}", "EndTime=now+2")
    lab.running("hung")
    planted.rank_of(lab.run_directory("hung"), 1).send_signal(signal.SIGSTOP)
    lab.running("gpu lost")
    machine = agent_on(lab, lab.nodes("gpu lost")[0], folder)
    machines.callback(machine.close)
    planted.write_xid(machine.folder / "kmsg")
    lost.touch()
    lab.running("node lost")
    with lab.slurm.without(TO_LOSE):
        lab.slurm.run("scontrol", "update", f"NodeName={TO_LOSE}", "State=DOWN", "Reason=planted")
        lab.decided("node lost")
    lab.decided("hung")
    lab.alice.cancel(lab.jobs["hung"])
    for name in lab.jobs:
        lab.decided(name)
    lab.decided("checkpoint", 2)


def agent_on(lab: Lab, node: str, folder: Path) -> Machine:
    """Return an agent that has reported the node's GPUs, one of which the job holds."""
    machine = Machine(lab.portal, folder, node, range(8))
    with lab.portal.client() as sysadmin:
        machine.start(sysadmin.post(f"/api/v1/nodes/{node}/token").json()["token"])
        until(lambda: is_allocated(sysadmin.get(f"/api/v1/nodes/{node}/gpus")), f"the GPUs of {node} to be allocated")
    return machine


def is_allocated(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and any(gpu["holders"] for gpu in answer.json()["items"])


def block_output(lab: Lab, name: str) -> None:
    """Put a folder where slurmd opens its output file, so that it cannot start the batch script."""
    job_dir = lab.run_directory(name) / "job"
    until(job_dir.is_dir, "its folder")
    (job_dir / "batch.1.log").mkdir()


@pytest.mark.parametrize("name", [*PLANTED, "gpu lost"])
def test_is_found_out_and_decided_on_in_time(lab: Lab, name: str) -> None:
    lab.planted[name].check(lab.ending(name))


def test_a_checkpoint_that_cannot_be_read_is_gone_back_behind(lab: Lab) -> None:
    planted.CORRUPT.check(lab.ending("checkpoint", 2))


def test_nodes_are_named(lab: Lab) -> None:
    """The node is also excluded from what follows, if Vigil and not Slurm starts that."""
    for name in ("node lost", "gpu lost", "launch"):
        (incident,), nodes = lab.ending(name).incidents, lab.ending(name).nodes
        assert (incident.node,) == nodes
    for name in ("gpu lost", "launch"):
        assert f"without {lab.ending(name).nodes[0]}" in lab.ending(name).decision
