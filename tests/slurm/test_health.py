"""Health rules act on a real Slurm: an Xid in a node's kernel log drains the node; people's drains and limits hold."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.nodes.agent.running import Kmsg
from tests.nvml import bus
from tests.slurm.cluster import Cluster
from tests.slurm.machine import Machine
from tests.slurm.portal import Portal, script
from tests.waiting import until

BROKEN, DRAINED_BY_PERSON, BEYOND_LIMIT, ELSEWHERE = "dgx01", "dgx02", "dgx03", "dgx04"
OFF_BUS = "[node] Xid 79 on GPU 0 (vigil: off-bus)"


class HealthLab:
    """Three nodes with agents, and the portal that may drain them."""

    def __init__(self, slurm: Cluster, portal: Portal, machines: dict[str, Machine], client: httpx.Client) -> None:
        self.slurm, self.portal, self.machines, self.client = slurm, portal, machines, client

    def xid(self, node: str, code: int, text: str) -> None:
        address = bus(0).removeprefix("0000").lower().rpartition(".")[0]
        log = Kmsg(self.machines[node].folder / "kmsg")
        log.seq = len(log.path.read_text().splitlines())  # a game day may have written there
        log.append(f"NVRM: Xid (PCI:{address}): {code}, pid=7, name=python, {text}")

    def reason(self, node: str) -> str:
        """Return the reason in Slurm, without who set it."""
        found = re.search(r"Reason=(.*?) \[", self.slurm.run("scontrol", "show", "node", node))
        return found[1] if found else ""

    def is_drained(self, node: str) -> bool:
        return "DRAIN" in self.slurm.run("scontrol", "show", "node", node).partition("State=")[2].split()[0]

    def entry(self, node: str, rule: str) -> dict[str, Any] | None:
        items = self.client.get("/api/v1/health", params={"node": node, "rule": rule}).json()["items"]
        return next(iter(items), None)

    def decided(self, node: str, rule: str, decision: str) -> dict[str, Any]:
        def poll() -> dict[str, Any] | None:
            entry = self.entry(node, rule)
            return entry if entry and entry["decision"] == decision else None

        found = until(poll, f"{rule} on {node} to be {decision}")
        assert found is not None
        return found


@pytest.fixture(scope="module")
def lab(large: Cluster) -> Iterator[HealthLab]:
    slurm = large
    with ExitStack() as stack:
        portal = Portal(slurm, VIGIL_HEALTH="act", VIGIL_AGENT="no")
        stack.callback(portal.close)
        portal.start(timeout_s=180)
        portal.make_people()
        folder = Path(tempfile.mkdtemp(prefix="vigil-health-", dir=slurm.layout.scratch))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        client = stack.enter_context(portal.client())
        machines = {}
        for node in (BROKEN, DRAINED_BY_PERSON, BEYOND_LIMIT):
            machines[node] = machine = Machine(portal, folder, node, range(2))
            token = client.post(f"/api/v1/nodes/{node}/token").json()["token"]
            machine.start(token, VIGIL_AGENT_GAMEDAY="yes" if node == BROKEN else "no")
            stack.callback(machine.close)
        health_lab = HealthLab(slurm, portal, machines, client)
        for node in machines:
            until(partial(_has_gpus, client, node), f"the GPUs of {node}")
        yield health_lab


def _has_gpus(client: httpx.Client, node: str) -> bool:
    answer = client.get(f"/api/v1/nodes/{node}/gpus")
    return answer.status_code == 200 and len(answer.json()["items"]) == 2


@pytest.mark.timeout(600)
def test_a_game_day_ends_well_and_touches_nobody(lab: HealthLab) -> None:
    alice = lab.portal.as_person("alice")
    job = alice.submit(script(10**6, constraint=ELSEWHERE, time_limit="00:20:00"))
    alice.wait_for_step(job, 1)
    words = ("--partition", "batch", "--project", "vision", "--fault", "kill", "--fault", "xid", "--json")
    done = lab.portal.vigil("gameday", *words, timeout_s=500)
    assert done.returncode == 0, done.stderr + done.stdout
    undisturbed, killed, xid = json.loads(done.stdout)["drills"]
    assert undisturbed["state"] == killed["state"] == xid["state"] == "passed"
    assert killed["are_losses_identical"] is True
    assert 0 < killed["noticed_s"] < killed["training_again_s"]
    assert (xid["node"], xid["cause"]) == (BROKEN, "off-bus")
    assert xid["action"] == f"Drained by off-bus: {OFF_BUS.removesuffix(' (vigil: off-bus)')} (injected by a game day)."
    assert 0 < xid["noticed_s"] < xid["in_service_s"]
    assert not lab.is_drained(BROKEN)
    (attempt,) = alice.attempts(job)
    assert attempt["state"] == "running"
    alice.cancel(job)
    alice.client.close()


def test_an_xid_drains_its_node_within_the_limits_and_leaves_peoples_drains_alone(lab: HealthLab) -> None:
    slurm = lab.slurm
    slurm.run("scontrol", "update", f"NodeName={DRAINED_BY_PERSON}", "State=DRAIN", "Reason=fan 3")
    lab.xid(BROKEN, 79, "GPU has fallen off the bus.")
    until(lambda: lab.is_drained(BROKEN), "the drain")
    assert lab.reason(BROKEN) == OFF_BUS
    entry = lab.decided(BROKEN, "off-bus", "automatic")
    assert entry["action"] == "drain"

    lab.xid(DRAINED_BY_PERSON, 79, "GPU has fallen off the bus.")
    lab.decided(DRAINED_BY_PERSON, "off-bus", "proposed")
    lab.xid(BEYOND_LIMIT, 48, "DBE (double bit error) ECC error")
    beyond = lab.decided(BEYOND_LIMIT, "uncorrectable-memory-error", "proposed")
    assert beyond["held_back"] == "Vigil has drained 1 of at most 1 nodes in the last hour."
    assert lab.reason(DRAINED_BY_PERSON) == "fan 3"
    assert not lab.is_drained(BEYOND_LIMIT)

    lab.client.post(f"/api/v1/health/{entry['id']}/clear", json={"reason": "reseated"}).raise_for_status()
    until(lambda: not lab.is_drained(BROKEN), "Vigil to return its node")
    assert lab.is_drained(DRAINED_BY_PERSON)
    slurm.run("scontrol", "update", f"NodeName={DRAINED_BY_PERSON}", "State=RESUME")
