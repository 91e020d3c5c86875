"""Test `vigil burnin` of this machine: drained, tested inside a reservation, back in service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import steady
from tests.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.slow


def node_of(stack: Stack) -> dict[str, Any]:
    """Return the only node."""
    with stack.client() as client:
        found: list[dict[str, Any]] = until(lambda: client.get("/api/v1/nodes").json()["items"], "a node")
    return found[0]


def test_a_drained_machine_is_tested_and_returns(portal_up: Stack) -> None:
    name = node_of(portal_up)["name"]
    assert portal_up.vigil("drain", name, "--reason", "fan 3").returncode == 0
    refused = portal_up.vigil("burnin", name, "--for", "1m")
    assert (refused.returncode, "--may-undrain" in refused.stderr) == (1, True), refused.stderr
    started = portal_up.vigil("burnin", name, "--for", "1m", "--may-undrain", "--no-wait", "--json")
    assert started.returncode == 0, started.stderr
    burn_in = json.loads(started.stdout)
    with portal_up.client() as client:

        def current() -> dict[str, Any]:
            return dict(client.get(f"/api/v1/burnins/{burn_in['id']}").json())

        until(lambda: current()["state"] == "running", "the tests to run")
        assert client.post("/api/v1/burnins", json={"nodes": [name]}).status_code == 409
        spec = {**steady.spec(5, resources={"ranks_per_node": 1}), "name": "burnin-waits"}
        job = client.post("/api/v1/jobs", **steady.upload(spec)).raise_for_status().json()["id"]
        until(lambda: current()["nodes"][0]["tests"] >= 3, "results")
        assert client.get(f"/api/v1/jobs/{job}").json()["state"] == "pending", "others stay out"
        until(lambda: current()["state"] == "ended", "the end of the burn-in", seconds=300)
        (node,) = current()["nodes"]
        assert (node["verdict"], node["outcome"]) == ("passed", "In service."), current()
        assert node["tests"] >= 8
        until(lambda: client.get(f"/api/v1/jobs/{job}").json()["state"] == "completed", "the job to run")
    assert not node_of(portal_up)["reason"]
