"""Test that the agent plants a game day's faults below what must notice them, and only where its operator lets it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpus.reader import GpuReader
from nodes.agent import mounts, planting
from nodes.agent.disks import label
from nodes.agent.gpus.history import GpuHistory
from nodes.agent.gpus.samples import SampleWindow
from nodes.agent.gpus.watch import GpuWatch
from nodes.agent.kernel_log.reader import KernelLog
from nodes.agent.mounts import MountProbes
from nodes.agent.planting import MAX_SECONDS, PlantedFaults
from nodes.agent.reporting.posting import PlantRequest
from nodes.agent.settings import InvalidSetting, read_settings
from tests.nodes.agent.running import PERIOD_S, Running
from tests.nvml import StandIn, bus, uuid
from tests.waiting import until

WITH_FAULTS = {"VIGIL_AGENT_GAMEDAY": "yes"}


@pytest.fixture
def watch(tmp_path: Path) -> GpuWatch:
    """Return a watch that has read no GPU."""
    return GpuWatch(GpuReader(every=1.0), GpuHistory(tmp_path), SampleWindow(1.0), lambda event: None)


@pytest.fixture
def kernel_log(tmp_path: Path) -> KernelLog:
    path = tmp_path / "kmsg"
    path.touch()
    log = KernelLog(path)
    log.open()
    return log


def answer(faults: PlantedFaults, log: KernelLog, watch: GpuWatch, fault: str, number: int = 1, *there: str) -> Any:
    faults.requests.put(PlantRequest(number, fault, 10.0))
    return faults.advance(log, watch, lambda: there)


@pytest.mark.slow
def test_an_xid_and_a_hung_driver_are_noticed_and_marked(agent: Running, gpus: StandIn) -> None:
    agent.start(**WITH_FAULTS)
    until(lambda: any(facts.get("game_day") and facts["gpus"] for facts in agent.portal.events("facts")))
    agent.portal.plant = {"id": 7, "fault": "xid", "seconds": 30}
    (xid,) = until(lambda: agent.portal.events("xid"))
    assert (xid["xid"], xid["gpu"], xid["planted"], xid["source"]) == (79, uuid(0), 7, "kernel")
    assert "fallen off the bus. Injected by Vigil's game day" in xid["text"]
    (planted,) = agent.portal.events("fault.planted")
    assert planted["planted_until"] == pytest.approx(planted["at"] + 30, abs=1)

    agent.portal.plant = {"id": 8, "fault": "nvml", "seconds": 40 * PERIOD_S}
    (silent,) = until(lambda: agent.portal.events("gpu.silent"))
    (answers,) = until(lambda: agent.portal.events("gpu.answers"))
    assert silent["planted"] == answers["planted"] == 8
    agent.kmsg.seq += 1  # the planted line's number
    agent.kmsg.append(f"NVRM: Xid (PCI:{bus(1)}): 79, pid=7, name=python, GPU has fallen off the bus.")
    real = until(lambda: [event for event in agent.portal.events("xid") if event.get("gpu") == uuid(1)])
    assert "planted" not in real[0]
    assert [event["planted"] for event in agent.portal.events("fault.planted")] == [7, 8], "each request once"
    agent.end()


def test_a_restored_portal_may_restart_its_numbers_and_a_repeated_request_plants_once(
    watch: GpuWatch, kernel_log: KernelLog
) -> None:
    faults = PlantedFaults(is_allowed=False)
    answered = [len(answer(faults, kernel_log, watch, "xid", number)) for number in (9, 9, 2, 2)]
    assert answered == [1, 0, 1, 0]


@pytest.mark.slow
def test_nothing_is_planted_where_the_operator_does_not_allow_it(agent: Running) -> None:
    agent.portal.plant = {"id": 7, "fault": "xid", "seconds": 30}
    agent.start()
    (refused,) = until(lambda: agent.portal.events("fault.refused"))
    assert refused["text"] == "VIGIL_AGENT_GAMEDAY is not yes on this node."
    agent.end()
    assert agent.kmsg.path.read_text() == ""
    assert not any("game_day" in facts for facts in agent.portal.events("facts"))


def test_a_mount_is_slow_and_well_again(
    kernel_log: KernelLog, watch: GpuWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "SLOW_SECONDS", 0.3)
    monkeypatch.setattr(planting, "PROBE_DELAY_S", 0.6)
    faults, other = PlantedFaults(is_allowed=True), tmp_path / "other"
    other.mkdir()
    paths = (str(tmp_path), str(other))
    probes = MountProbes(faults.probe)

    def reported(kind: str) -> Any:
        probes.start_probes(paths)
        events = faults.marked(probes.poll(time.time()))
        return [event for event in events if (event["kind"], event["mount"]) == (kind, label(str(tmp_path)))]

    (event,) = answer(faults, kernel_log, watch, "mount", 5, *paths)
    assert (event["kind"], event["text"]) == ("fault.planted", f"{label(str(tmp_path))} responds after 1 s.")
    (slow,) = until(lambda: reported("mount.slow"))
    assert slow["planted"] == 5
    faults.end(watch)
    (well,) = until(lambda: reported("mount.well"))
    assert well["planted"] == 5
    assert faults.marked([{"kind": "mount.slow", "mount": str(other)}]) == [{"kind": "mount.slow", "mount": str(other)}]


def test_refusals_give_the_reason(kernel_log: KernelLog, watch: GpuWatch) -> None:
    faults = PlantedFaults(is_allowed=True)
    reasons = [answer(faults, kernel_log, watch, fault, place)[0]["text"]
               for place, fault in enumerate(("xid", "nvml", "mount", "fire"), 1)]  # fmt: skip
    assert reasons == [
        "This node has no GPU.",
        "This node has no GPU.",
        "This node's agent times no shared mount (VIGIL_AGENT_MOUNTS).",
        "This agent does not know this fault: it is older than the portal.",
    ]
    assert answer(faults, kernel_log, watch, "mount", 4, "/data") == [], "a request is answered once"
    assert answer(faults, kernel_log, watch, "mount", 5, "/data")[0]["kind"] == "fault.planted"
    assert answer(faults, kernel_log, watch, "mount", 6, "/data")[0]["text"].startswith("Another injected fault")


def test_nothing_is_planted_next_to_a_job(kernel_log: KernelLog, watch: GpuWatch, tmp_path: Path) -> None:
    (tmp_path / "proc" / "8").mkdir(parents=True)
    cgroup = tmp_path / "proc" / "8" / "cgroup"
    faults = PlantedFaults(is_allowed=True, proc=tmp_path / "proc")
    cgroup.write_text("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n")
    (event,) = answer(faults, kernel_log, watch, "mount", 1, "/data")
    assert (event["kind"], event["text"]) == ("fault.refused", "A job or another program uses this node.")
    cgroup.write_text("0::/system.slice/slurmstepd.scope/system\n")
    assert answer(faults, kernel_log, watch, "mount", 2, "/data")[0]["kind"] == "fault.planted"


def test_no_fault_lasts_longer_than_the_agent_allows(kernel_log: KernelLog, watch: GpuWatch) -> None:
    faults = PlantedFaults(is_allowed=True)
    faults.requests.put(PlantRequest(1, "mount", 80_000.0))
    (event,) = faults.advance(kernel_log, watch, lambda: ("/data",))
    assert event["planted_until"] - event["at"] == pytest.approx(MAX_SECONDS, abs=1)


class TestKernelLog:
    @pytest.fixture(params=["file", "fifo"])
    def log(self, request: pytest.FixtureRequest, tmp_path: Path) -> KernelLog:
        path = tmp_path / "log"
        path.touch() if request.param == "file" else os.mkfifo(path)
        log = KernelLog(path)
        log.open()
        return log

    def test_a_line_that_it_wrote_is_read_once(self, log: KernelLog) -> None:
        log.write("NVRM: Xid (PCI:0000:05:00): 79, mine")
        (record,) = log.read()
        assert record.text == "NVRM: Xid (PCI:0000:05:00): 79, mine"
        log.write("another")
        again = f"12,9,1,-;{record.text}\n"
        with open(log.path, "a") as file:
            file.write(again)
        assert [found.text for found in log.read()] == ["another"], "the same line by somebody else is no record"

    def test_a_log_that_cannot_be_written_raises(self, log: KernelLog, watch: GpuWatch) -> None:
        log.path.unlink()
        with pytest.raises(FileNotFoundError):
            log.write("text")


@pytest.mark.parametrize("text", ["true", "1", "xid"])
def test_the_setting_is_yes_or_no(text: str) -> None:
    with pytest.raises(InvalidSetting, match="VIGIL_AGENT_GAMEDAY is '.*'. Set it to yes"):
        read_settings({"VIGIL_AGENT_GAMEDAY": text}, posts=False)
    assert read_settings({"VIGIL_AGENT_GAMEDAY": "yes"}, posts=False).takes_faults
    assert not read_settings({}, posts=False).takes_faults


@pytest.mark.parametrize(
    "value",
    [None, [], "xid", {"id": True, "fault": "xid", "seconds": 1}, {"id": 0, "fault": "xid", "seconds": 1},
     {"id": 2**60, "fault": "xid", "seconds": 1}, {"id": 1, "fault": 3, "seconds": 1},
     {"id": 1, "fault": "xid", "seconds": float("nan")}, {"id": 1, "fault": "xid", "seconds": 10**6}],
)  # fmt: skip
def test_a_request_that_cannot_be_read_is_none(value: object) -> None:
    assert PlantRequest.parse(value) is None
