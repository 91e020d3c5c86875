"""Test a complete `vigil up` on a machine with eight stand-in GPUs: use is reported, shown and attributed to jobs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import nvml, steady
from tests.nvml import StandIn
from tests.stack import Stack
from tests.waiting import until

pytestmark = pytest.mark.slow

HOST = os.uname().nodename.split(".")[0]
METRICS = "a token for Prometheus alone"


@dataclass
class Machine:
    stack: Stack
    gpus: StandIn
    kernel_log: Path
    records: int = 0

    def get(self, path: str) -> Any:
        with self.stack.client() as client:
            answer = client.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, gpus: int) -> int:
        spec = steady.spec(1_000_000)
        spec["resources"] = {"gpus_per_node": gpus, "time_limit": "00:30:00"}
        with self.stack.client() as client:
            answer = client.post("/api/v1/jobs", **steady.upload(spec))
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def cancel(self, job_id: int) -> None:
        with self.stack.client() as client:
            client.post(f"/api/v1/jobs/{job_id}/cancel")

    def write_down(self, text: str) -> None:
        """A record of the kernel's."""
        now = int(1e6 * float(Path("/proc/uptime").read_text().split()[0]))
        self.records += 1
        with self.kernel_log.open("a") as log:
            log.write(f"3,{self.records},{now},-;{text}\n")


@pytest.fixture(scope="module")
def machine(prepared_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    gpus, log = StandIn(folder), folder / "kmsg"
    log.touch()
    stack = Stack(
        prepared_home,
        **gpus.environment,
        VIGIL_LOCAL_ENVIRONMENT="NVML_STATE",
        VIGIL_LOCAL_CPUS="8",
        VIGIL_AGENT_KMSG=str(log),
        VIGIL_AGENT_MOUNTS="none",
        VIGIL_METRICS_TOKEN=METRICS,
        VIGIL_HEALTH="act",
    )
    try:
        stack.start()
        yield Machine(stack, gpus, log)
    finally:
        stack.close()


def test_a_newcomer_sees_their_machine_live(machine: Machine) -> None:
    there = until(lambda: _gpus(machine), "the agent to tell of GPUs")
    assert [gpu["uuid"] for gpu in there] == [nvml.uuid(i) for i in range(8)]
    report = machine.get(f"/api/v1/nodes/{HOST}/telemetry")
    assert report["facts"]["driver"]
    assert report["host"]["cpu_percent"] >= 0
    until(lambda: HOST in [node["name"] for node in machine.get("/api/v1/nodes")["items"]], "the first reading")
    assert machine.get(f"/api/v1/nodes/{HOST}")["gpus"] == 8, "the local scheduler has them, too"


def _gpus(machine: Machine) -> list[dict[str, Any]]:
    with machine.stack.client() as client:
        answer = client.get(f"/api/v1/nodes/{HOST}/gpus")
    items: list[dict[str, Any]] = answer.json()["items"] if answer.status_code == 200 else []
    return items if items and all(gpu["newest"] for gpu in items) else []


def _holders(machine: Machine) -> list[list[int]]:
    return [[holder["job"] for holder in gpu["holders"]] for gpu in _gpus(machine)]


def test_each_job_shows_its_gpus(machine: Machine) -> None:
    machine.gpus.set_state(
        "* gpu_percent 0", "0 gpu_percent 77", "1 gpu_percent 77", "2 gpu_percent 33", "3 gpu_percent 33"
    )
    jobs = [machine.submit(2), machine.submit(2)]
    try:
        found = [until(lambda job=job: _heat(machine, job), f"what the GPUs of #{job} do") for job in jobs]
        uuids = [{row["uuid"] for row in heat["items"]} for heat in found]
        assert sorted(map(sorted, uuids)) == [[nvml.uuid(0), nvml.uuid(1)], [nvml.uuid(2), nvml.uuid(3)]]
        for heat, allocated in zip(found, uuids, strict=True):
            busy = 77 if nvml.uuid(0) in allocated else 33
            assert busy in {value for row in heat["items"] for value in row["most"]}
        holders = {gpu["index"]: [holder["job"] for holder in gpu["holders"]] for gpu in _gpus(machine)}
        assert sorted(holders[0] + holders[2]) == jobs
        assert holders[4] == []
        sources = {holder["source"] for gpu in _gpus(machine)[:4] for holder in gpu["holders"]}
        assert sources <= {"scheduler", "launcher"}
    finally:
        for job in jobs:
            machine.cancel(job)
    until(lambda: not any(gpu["holders"] for gpu in _gpus(machine)), "the GPUs to be held no more")


def _heat(machine: Machine, job: int) -> dict[str, Any] | None:
    heat: dict[str, Any] = machine.get(f"/api/v1/jobs/{job}/gpus?columns=20")
    reports = [value for row in heat["items"] for value in row["most"] if value]
    return heat if heat["source"] == "agent" and len(heat["items"]) == 2 and reports else None


def test_an_xid_of_the_kernel_log_is_detected(machine: Machine) -> None:
    """REST, the machine's page, the page of the job that had the GPU and Prometheus all show it."""
    job = machine.submit(8)
    until(lambda: _holders(machine) == [[job]] * 8, "the job to hold them")
    address = nvml.bus(5).removeprefix("0000").lower().rpartition(".")[0]
    machine.write_down(f"NVRM: Xid (PCI:{address}): 79, pid='<unknown>', name=<b>x</b>, GPU has fallen off the bus.")
    began = time.monotonic()
    (event,) = until(lambda: machine.get(f"/api/v1/nodes/{HOST}/events?kind=xid")["items"], "the Xid")
    assert time.monotonic() - began < 30
    assert (event["code"], event["gpu"], event["uuid"]) == (79, 5, nvml.uuid(5))
    with httpx.Client(base_url=machine.stack.url, follow_redirects=True, timeout=30, trust_env=False) as browser:
        machine.stack.sign_in(browser)
        for path in (f"/nodes/{HOST}", f"/jobs/{job}"):
            shown = browser.get(path).text
            assert "Xid 79: GPU fell off the bus" in shown
            assert "<b>x</b>" not in shown
    machine.cancel(job)
    with machine.stack.client() as client:
        answer = client.get("/metrics", headers={"Authorization": f"Bearer {METRICS}"})
    assert f'gpu="5",uuid="{nvml.uuid(5)}",xid="79"' in answer.text.replace(" ", ""), answer.text[:2000]


def test_the_only_machine_is_drained_once_a_person_agrees(machine: Machine) -> None:
    """Vigil may act here, but 20 % of one machine is none. Agent, rules, decision and scheduler are real."""
    until(lambda: _gpus(machine) and machine.get("/api/v1/nodes")["items"], "the scheduler and the agent to report")
    address = nvml.bus(6).removeprefix("0000").lower().rpartition(".")[0]
    machine.write_down(f"NVRM: Xid (PCI:{address}): 95, pid='<unknown>', name=<unknown>, Uncontained ECC error.")
    query = f"/api/v1/health?node={HOST}&rule=uncorrectable-memory-error"
    (entry,) = until(lambda: [e for e in machine.get(query)["items"] if e["decision"]], "the decision")
    assert (entry["state"], entry["action"], entry["decision"]) == ("open", "reset", "proposed")
    assert "has 1 node. Vigil drains by itself only where" in entry["held_back"]
    with machine.stack.client() as client:
        client.post(f"/api/v1/health/{entry['id']}/approve", json={"reason": "agreed"}).raise_for_status()
        until(lambda: "drain" in machine.get(f"/api/v1/nodes/{HOST}")["state"], "the drain")
        assert machine.get(f"/api/v1/nodes/{HOST}")["reason"].startswith("[node] Xid 95 on GPU 6")
        client.post(f"/api/v1/health/{entry['id']}/clear", json={"reason": "reset"}).raise_for_status()
    machine.stack.vigil("undrain", HOST)


@pytest.mark.exhaustive
def test_a_driver_that_hangs_stops_nothing_else(machine: Machine) -> None:
    machine.gpus.set_state("* hang 1")
    silent = until(lambda: machine.get(f"/api/v1/nodes/{HOST}/events?kind=gpu.silent")["items"], "a word")
    assert silent[0]["is_open"]
    assert not machine.get(f"/api/v1/nodes/{HOST}/telemetry")["is_silent"], "the agent itself tells on"
    machine.gpus.set_state()
    until(
        lambda: not machine.get(f"/api/v1/nodes/{HOST}/events?kind=gpu.silent")["items"][0]["is_open"],
        "NVML to answer again",
    )
