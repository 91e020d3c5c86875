"""Test `check`, as Slurm's prolog calls it, and `--once`, as people do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nodes.agent import checking
from nodes.agent.checking import ANSWER_SECONDS
from tests.nodes.agent.hanging import NoFuse, hanging
from tests.nodes.agent.running import Running
from tests.nvml import StandIn, bus, uuid

pytestmark = pytest.mark.slow


LATE = ("NVML did not respond within", "This node's check did not finish in time")
TRIES = 5  # a busy machine may need more than the check's 1.5 s to start the process that opens NVML


def checked(agent: Running, *, tries: int = TRIES, **environment: str) -> tuple[int, str]:
    """Return the check's exit code and its line on stdout; run it again while it is late, unless it is meant to be."""
    for _ in range(tries):
        began = time.monotonic()
        done = agent.run("check", **environment)
        assert time.monotonic() - began < ANSWER_SECONDS + 5, "a busy machine starts slowly"
        assert done.stdout.count("\n") == 1
        if not done.stdout.startswith(LATE):
            break
    return done.returncode, done.stdout.strip()


class TestCheck:
    def test_a_well_node(self, agent: Running) -> None:
        assert checked(agent) == (0, "node01 is healthy: 8 GPUs respond.")

    def test_a_node_without_gpus(self, agent: Running) -> None:
        assert checked(agent, LD_LIBRARY_PATH="") == (0, "node01 is healthy: no GPU.")

    def test_nvml_that_hangs(self, agent: Running, gpus: StandIn) -> None:
        gpus.set_state("* hang 1")
        assert checked(agent, tries=1) == (1, "NVML did not respond within 1.5 s.")

    @pytest.mark.parametrize(
        ("state", "sentence"),
        [
            ("3 lost 1", f"GPU 3 ({bus(3)}) is lost."),
            ("3 field.230 1", f"GPU 3 ({bus(3)}) needs a reset."),
            ("3 field.230 2", f"GPU 3 ({bus(3)}) needs a reboot of the node."),
            ("3 field.230 99", f"GPU 3 ({bus(3)}) needs repair."),
            ("3 remapped_failed 1", f"GPU 3 ({bus(3)}) failed to remap a memory row and must be replaced."),
            ("3 ecc_uncorrected 2", f"GPU 3 ({bus(3)}) has had 2 uncorrectable memory errors and needs a reset."),
            ("3 sram_threshold_exceeded 1", f"GPU 3 ({bus(3)}) has exceeded NVIDIA's SRAM error threshold"),
            ("* init !9", "NVML cannot be opened"),
        ],
    )
    def test_a_sick_gpu(self, agent: Running, gpus: StandIn, state: str, sentence: str) -> None:
        assert checked(agent)[0] == 0
        gpus.set_state(state)
        code, report = checked(agent)
        assert code == 1
        assert report.startswith(sentence)

    def test_rows_that_wait_for_a_reset_at_leisure_stop_nobody(self, agent: Running, gpus: StandIn) -> None:
        gpus.set_state("3 remapped_pending 1")
        assert checked(agent)[0] == 0

    def test_a_gpu_that_was_there_and_is_not(self, agent: Running, gpus: StandIn) -> None:
        assert checked(agent)[0] == 0
        gpus.set_state("* count 7")
        code, report = checked(agent)
        assert code == 1
        file = agent.state / "gpus.json"
        assert report == f"7 of 8 GPUs are present ({bus(7)} missing). If this is intended, delete {file}."
        file.unlink()
        assert checked(agent) == (0, "node01 is healthy: 7 GPUs respond.")

    def test_another_gpu_in_the_slot_is_as_good(self, agent: Running, gpus: StandIn) -> None:
        assert checked(agent)[0] == 0
        gpus.set_state("3 uuid GPU-another")
        assert checked(agent)[0] == 0

    def test_a_mount_that_hangs(self, agent: Running, tmp_path: Path) -> None:
        try:
            with hanging(tmp_path / "m") as system:
                code, report = checked(agent, VIGIL_AGENT_MOUNTS=str(system.path))
                assert code == 1
                assert report.endswith("does not respond.")
                system.well.set()
                assert checked(agent, VIGIL_AGENT_MOUNTS=str(system.path))[0] == 0
        except NoFuse:
            pytest.skip("no FUSE here")

    def test_a_mount_that_is_not_mounted(self, agent: Running, tmp_path: Path) -> None:
        code, report = checked(agent, VIGIL_AGENT_MOUNTS=str(tmp_path))
        assert code == 1
        assert report.endswith("is listed in VIGIL_AGENT_MOUNTS but not mounted.")

    def test_a_wrong_setting(self, agent: Running) -> None:
        code, report = checked(agent, VIGIL_AGENT_STATE="state")
        assert code == 1
        assert "VIGIL_AGENT_STATE" in report

    def test_next_to_a_running_agent(self, agent: Running) -> None:
        agent.start()
        agent.reader()
        assert checked(agent)[0] == 0
        agent.end()


class TestOnce:
    def test_a_single_sample_of_everything(self, agent: Running) -> None:
        done = agent.run("--once", "--json")
        assert done.returncode == 0, done.stderr
        payload = json.loads(done.stdout)
        assert [gpu["uuid"] for gpu in payload["gpus"]] == [uuid(number) for number in range(8)]
        assert payload["gpus"][0]["gpu_percent"] == 90
        assert payload["gpus"][0]["counters"]["pcie_width"] == 16
        assert payload["facts"]["driver"] == "570.86.15"
        assert "cpu_percent" in payload["host"]
        assert payload["processes"] == []

    def test_for_people(self, agent: Running, gpus: StandIn) -> None:
        gpus.set_state("3 lost 1")
        done = agent.run("--once")
        assert done.returncode == 0
        assert f"GPU 0 NVIDIA H100 80GB HBM3 {uuid(0)}: 90%, 30720 MiB, 60 °C, 350 W, 1980 MHz" in done.stdout
        assert f"{uuid(4)}: 90%" in done.stdout
        assert ": lost" in done.stdout

    def test_without_a_gpu_it_reports_none(self, agent: Running) -> None:
        done = agent.run("--once", LD_LIBRARY_PATH="")
        assert done.returncode == 0
        assert "GPUs are not monitored" in done.stdout


def test_a_pile_is_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = list(range(100, 140))
    assert list(checking._blocked_processes(pids, pids[:16])) == []
    (sentence,) = checking._blocked_processes(pids, pids[:17] + [7])
    assert sentence.startswith("17 processes are blocked on a disk")


def test_room_is_missed_when_there_is_none(tmp_path: Path) -> None:
    assert list(checking._low_space(str(tmp_path), 0)) == []
    (sentence,) = checking._low_space(str(tmp_path), 2**40)
    assert "MiB left" in sentence
