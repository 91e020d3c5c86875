"""Test `vigil drain` of this machine: running jobs continue, submitted ones wait, and `vigil why` says why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests import steady
from tests.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def stack(portal_up: Stack) -> Iterator[Stack]:
    """The shared portal, which takes jobs again and runs none of this test's when it is over."""
    yield portal_up
    portal_up.vigil("undrain", node_of(portal_up)["name"])
    with portal_up.client() as client:
        for job in client.get("/api/v1/jobs", params={"q": "drain-"}).json()["items"]:
            client.post(f"/api/v1/jobs/{job['id']}/cancel")
    until(lambda: not portal_up.job_processes(), "every job's processes to end")


def node_of(stack: Stack) -> dict[str, Any]:
    """The only one."""
    with stack.client() as client:
        found: list[dict[str, Any]] = until(lambda: client.get("/api/v1/nodes").json()["items"], "a node")
    return found[0]


def submit(client: httpx.Client, name: str, steps: int) -> str:
    spec = {**steady.spec(steps, resources={"ranks_per_node": 1}), "name": name}
    return f"/api/v1/jobs/{client.post('/api/v1/jobs', **steady.upload(spec)).raise_for_status().json()['id']}"


def test_a_drained_machine(stack: Stack) -> None:
    name = node_of(stack)["name"]
    with stack.client() as client:

        def state(job: str) -> str:
            return str(client.get(job).json()["state"])

        running = submit(client, "drain-runs", 1_000_000)
        until(lambda: (client.get(running).json()["progress"]["step"] or 0) > 0, "the first job's steps")
        drained = stack.vigil("drain", name, "--reason", "fan 3")
        assert (drained.returncode, drained.stdout) == (0, "")
        assert f"Done: {name} accepts no new jobs." in drained.stderr
        waiting = submit(client, "drain-waits", 5)
        until(lambda: node_of(stack)["state"] == "draining", "the node's state to be read")
        until(lambda: "drained" in client.get(f"{waiting}/why").json()["said"], "the scheduler's word")
        reason = f"fan 3 (vigil: {client.get('/api/v1/me').json()['username']})"
        sentence, scheduler, *_ = stack.vigil("why", waiting.rpartition("/")[2]).stdout.splitlines()
        assert sentence.startswith(f"{name} is draining: {reason}. Running jobs continue; nothing new starts until")
        assert scheduler.strip() == f"scheduler: This machine is drained: {reason}."
        assert state(waiting) == "pending"
        step = client.get(running).json()["progress"]["step"]
        until(lambda: client.get(running).json()["progress"]["step"] > step, "the first job to go on")
        shown = json.loads(stack.vigil("node", name, "--json").stdout)
        assert (shown["takes_jobs"], shown["reason"]) == (False, reason)
        client.post(f"{running}/cancel").raise_for_status()
        until(lambda: node_of(stack)["state"] == "drained", "the last job's end")
        assert state(waiting) == "pending"

        assert stack.vigil("undrain", name).returncode == 0
        until(lambda: state(waiting) == "completed", "the second job to run")
        again = stack.vigil("undrain", name)
        assert (again.returncode, f"{name} is not drained" in again.stderr) == (1, True)
