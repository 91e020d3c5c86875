"""Test a game day on a real Slurm: a killed rank restarts, an Xid drains a node and returns it, others run on."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.machine import Machine
from tests.slurm.portal import Portal, portal_on, script
from tests.stack import wait_for

ELSEWHERE = "dgx02"


@pytest.fixture
def acting(slurm: Cluster) -> Iterator[Portal]:
    with portal_on(slurm, VIGIL_HEALTH="act", VIGIL_AGENT="no") as created:
        yield created


def test_faults_of_ranks_and_nodes_end_well_and_touch_nobody(slurm: Cluster, acting: Portal, release: str) -> None:
    node = slurm.layout.names[0]
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="vigil-gameday-", dir=slurm.layout.scratch))
        stack.callback(shutil.rmtree, folder)
        folder.chmod(0o755)
        client, alice = stack.enter_context(acting.client()), acting.as_person("alice")
        stack.callback(alice.client.close)
        machine = Machine(acting, folder, node, range(8))
        stack.callback(machine.close)
        machine.start(
            client.post(f"/api/v1/nodes/{node}/token").raise_for_status().json()["token"], VIGIL_AGENT_GAMEDAY="yes"
        )
        others = alice.submit(script(10**6, constraint=ELSEWHERE))
        stack.callback(alice.cancel, others)
        alice.wait_for_step(others, 1)
        wait_for(lambda: client.get(f"/api/v1/nodes/{node}/gpus").status_code == 200, "the GPUs", 60)

        faults = ("--fault", "kill", "--fault", "xid")
        done = acting.vigil(
            "gameday", "--partition", "batch", "--project", "speech", *faults, "--json", timeout_s=400
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        undisturbed, killed, xid = json.loads(done.stdout)["drills"]
        assert undisturbed["state"] == killed["state"] == xid["state"] == "passed"
        assert killed["are_losses_identical"] is True
        assert 0 < killed["noticed_s"] < killed["training_again_s"]
        assert (xid["node"], xid["cause"], xid["driver"] != "") == (node, "off-bus", True)
        if release != "22.05":  # it drains by scontrol, which only root may run in this cluster
            assert xid["action"] == "Drained by off-bus: [node] Xid 79 on GPU 0 (planted by a game day)."
            assert 0 < xid["noticed_s"] < xid["in_service_s"]
        state = slurm.run("scontrol", "show", "node", node).partition("State=")[2].split()[0]
        assert "DRAIN" not in state
        (attempt,) = alice.attempts(others)
        assert (attempt["number"], attempt["state"]) == (1, "running")
