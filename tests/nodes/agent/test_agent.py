"""Test the agent as a real process, with eight stand-in GPUs, a prepared kernel log and an unreliable portal."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nodes.agent.gpus.samples import COLUMNS
from nodes.agent.version import VERSION
from tests.nodes.agent.disks import occupy
from tests.nodes.agent.hanging import NoFuse, hanging
from tests.nodes.agent.running import PERIOD_S, Running
from tests.nvml import StandIn, bus, uuid
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
FALLEN = "NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def fault(address: int) -> str:
    return f"NVRM: Xid (PCI:0000:15:00): 31, pid=7, name=python, MMU Fault @ 0x{address:x}."


def sampled(agent: Running, least: int = 1) -> list[dict[str, Any]]:
    """Return batches with samples of all GPUs, once there are so many."""
    return until(lambda: len(found := _full(agent)) >= least and found)


def _full(agent: Running) -> list[dict[str, Any]]:
    return [batch for batch in agent.portal.batches() if len(batch["gpus"]) == 8]


def counted(agent: Running) -> int:
    """Return all reported records of the kernel log."""
    return sum(event["count"] for event in agent.portal.events("xid") if event["source"] == "kernel")


class TestReports:
    def test_every_gpu_by_all_columns_without_a_hole(self, agent: Running, gpus: StandIn) -> None:
        with subprocess.Popen(["sleep", str(PATIENCE_S)]) as job:
            gpus.set_state(f"3 process {job.pid} 512", "3 field.138 5+1048576", "2 gpu_percent 17")
            agent.start()
            batches = sampled(agent, 4)
            agent.end()
            job.kill()
        middle = batches[1:3]
        for batch in middle:
            assert batch["gpus"] == [uuid(number) for number in range(8)]
            assert tuple(batch["columns"]) == COLUMNS
            assert {len(column) for column in batch["columns"]["watts"]} == {batch["n"]}
            assert set(batch["columns"]["gpu_percent"][2]) - {None} == {17}, "a look may be late on a busy machine"
        assert middle[1]["at"] == pytest.approx(middle[0]["at"] + middle[0]["n"] * middle[0]["period"])
        (process,) = batches[-1]["processes"]
        assert process == {
            **{"gpu": uuid(3), "pid": job.pid, "name": "sleep", "memory_mib": 512, "job": ""},
            "user": process["user"],
        }
        assert batches[-1]["host"]["memory_total_mib"] > 0
        assert "cpu_percent" in batches[-1]["host"]

    def test_first_what_the_machine_is(self, agent: Running) -> None:
        agent.start()
        (facts,) = until(lambda: agent.portal.events("facts"))
        assert [gpu["uuid"] for gpu in facts["gpus"]] == [uuid(number) for number in range(8)]
        assert (facts["driver"], facts["agent"], facts["problems"]) == ("570.86.15", VERSION, {})
        (boot,) = agent.portal.events("boot")
        assert boot["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        until(lambda: len(agent.portal.events("gpu.counters")) == 8)
        agent.end()
        agent.start()
        until(lambda: len(agent.portal.events("facts")) == 2)
        assert len(agent.portal.events("boot")) == 1, "it has not booted since"

    def test_counters_when_they_change(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        until(lambda: len(agent.portal.events("gpu.counters")) == 8)
        # Those are read every 10 s; another child reads them at once.
        gpus.set_state("4 remapped_failed 1", "4 gpu_percent 0", "4 pcie_generation 1")
        agent.reader().kill()
        until(lambda: len(agent.portal.events("gpu.counters")) == 9)
        last = agent.portal.events("gpu.counters")[-1]
        assert (last["gpu"], last["remapped_failed"]) == (uuid(4), 1)
        assert last["pcie_generation"] == 5, "it has only lowered it to save power"
        gpus.set_state("4 remapped_failed 1", "4 pcie_generation 3")
        agent.reader().kill()
        until(lambda: len(agent.portal.events("gpu.counters")) == 10)
        assert agent.portal.events("gpu.counters")[-1]["pcie_generation"] == 3, "it is slow while it works"

    def test_a_lost_gpu_and_its_return(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("5 lost 1")
        (lost,) = until(lambda: agent.portal.events("gpu.lost"))
        assert (lost["gpu"], lost["index"], lost["bus"]) == (uuid(5), 5, bus(5))
        gpus.set_state("")
        (back,) = until(lambda: agent.portal.events("gpu.back"))
        assert back["gpu"] == uuid(5)

    def test_a_gpu_that_vanished_from_nvml_is_lost_too_and_once(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("* reload 1", "* count 7")
        (lost,) = until(lambda: agent.portal.events("gpu.lost"))
        assert (lost["gpu"], lost["bus"], lost["reason"]) == (uuid(7), bus(7), "vanished")
        gpus.set_state("* reload 2")
        (back,) = until(lambda: agent.portal.events("gpu.back"))
        assert back["gpu"] == uuid(7)
        assert len(agent.portal.events("gpu.lost")) == 1

    def test_a_lost_gpu_that_vanishes_is_reported_once(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("7 lost 1")
        until(lambda: agent.portal.events("gpu.lost"))
        gpus.set_state("* reload 1", "* count 7")
        until(lambda: agent.portal.events("driver.reloaded"))
        gpus.set_state("* reload 2")
        until(lambda: agent.portal.events("gpu.back"))
        assert len(agent.portal.events("gpu.lost")) == len(agent.portal.events("gpu.back")) == 1

    def test_another_gpu_in_the_slot_is_no_loss(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("* reload 1", "3 uuid GPU-another")
        until(lambda: agent.portal.events("driver.reloaded"))
        until(lambda: len(agent.portal.events("facts")) == 2)
        assert not agent.portal.events("gpu.lost")

    def test_what_ended_while_no_agent_ran_is_reported_by_the_next(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("5 lost 1")
        until(lambda: agent.portal.events("gpu.lost"))
        gpus.set_state("5 lost 1", "* hang 1")
        (silent,) = until(lambda: agent.portal.events("gpu.silent"))
        agent.kill()
        gpus.set_state("")
        agent.start()
        (back,) = until(lambda: agent.portal.events("gpu.back"))
        (answers,) = until(lambda: agent.portal.events("gpu.answers"))
        assert (back["gpu"], back["index"]) == (uuid(5), 5)
        assert answers["since"] == silent["since"]
        agent.kill()
        agent.start()
        sampled(agent, len(_full(agent)) + 1)
        assert len(agent.portal.events("gpu.back", "gpu.answers")) == 2, "each once"

    def test_without_a_driver_it_reports_the_host(self, agent: Running) -> None:
        agent.start(LD_LIBRARY_PATH="")
        batches = until(lambda: len(agent.portal.batches()) >= 2 and agent.portal.batches())
        assert batches[1]["gpus"] == []
        assert batches[1]["n"] == 10
        assert batches[1]["host"]["load_1"] is not None
        (facts,) = until(lambda: agent.portal.events("facts"))
        assert facts["gpus"] == []
        assert "GPUs are not monitored" in agent.log


class TestXids:
    def test_an_xid_is_reported_long_before_its_window_ends(self, agent: Running) -> None:
        agent.start(period=1.0)
        until(lambda: agent.portal.events("gpu.counters") or agent.portal.events("facts"))
        (seq,) = agent.kmsg.append(FALLEN)
        (xid,) = until(lambda: agent.portal.events("xid"))
        assert (xid["gpu"], xid["xid"], xid["seq"], xid["count"]) == (uuid(0), 79, seq, 1)
        assert abs(xid["at"] - time.time()) < 5
        assert [item.batch["n"] for item in agent.portal.taken if xid in item.batch["events"]] == [0]

    def test_nvml_confirms_it(self, agent: Running, gpus: StandIn) -> None:
        agent.start(period=1.0)
        until(lambda: agent.portal.events("facts"))
        until(lambda: agent.reader().status() == psutil.STATUS_SLEEPING)
        gpus.event(1, 31)
        agent.kmsg.append(fault(1))
        until(lambda: [item for item in agent.portal.events("xid") if item["confirmed"]])
        report = agent.portal.events("xid")
        assert {event["seq"] for event in report} == {0}, "reported again, it is the same"

    def test_an_xid_that_is_missing_from_the_kernel_log(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.event(2, 48)
        (xid,) = until(lambda: agent.portal.events("xid"))
        assert (xid["gpu"], xid["xid"], xid["source"], xid["confirmed"]) == (uuid(2), 48, "nvml", False)

    def test_a_flood_becomes_a_handful(self, agent: Running) -> None:
        agent.start()
        until(lambda: agent.portal.events("facts"))
        total = 100_000
        for first in range(0, total, 10_000):
            agent.kmsg.append(*(fault(number) for number in range(first, first + 10_000)))
        until(lambda: counted(agent) == total)
        events = agent.portal.events("xid")
        assert len(events) < 60
        spans = sorted((event["seq"], event.get("last_seq", event["seq"])) for event in events)
        assert all(before[1] < after[0] for before, after in zip(spans, spans[1:], strict=False))

    def test_killed_at_any_moment_it_reports_each_xid_once(self, agent: Running) -> None:
        """Agents die, as do answers on their way; each record of the kernel log's counts once all the same."""
        choice = random.Random(13)
        agent.start()
        until(lambda: agent.portal.events("facts"))
        for turn in range(8):
            for _ in range(choice.randrange(1, 30)):
                agent.kmsg.append(*(fault(turn) for _ in range(choice.randrange(1, 5))), FALLEN, "usb 1-1: new device")
                time.sleep(choice.random() * 0.01)
            agent.portal.loses_answers = turn % 3 == 1
            time.sleep(choice.random() * 0.5)
            agent.kill()
            agent.start()
        agent.portal.loses_answers = False
        report = sum(1 for line in agent.kmsg.path.read_text().splitlines() if "Xid" in line)
        until(lambda: counted(agent) >= report)
        agent.reader()  # it has begun, so it ends in good order
        agent.end()
        spans = sorted(
            (event["xid"], event["seq"], event.get("last_seq", event["seq"])) for event in agent.portal.events("xid")
        )
        assert counted(agent) == report
        assert len(spans) == len(set(spans))
        taken = [item.number for item in agent.portal.taken]
        assert taken == list(range(len(taken))), "each batch once, in order"

    def test_a_kernel_log_that_may_not_be_read_is_reported(self, agent: Running, gpus: StandIn) -> None:
        agent.start(VIGIL_AGENT_KMSG="/nowhere/kmsg")
        until(lambda: "Only NVML reports Xids now" in agent.log)
        (facts,) = until(lambda: agent.portal.events("facts"))
        assert "No such file" in facts["problems"]["kernel_log"]
        sampled(agent)
        gpus.event(2, 48)
        (xid,) = until(lambda: agent.portal.events("xid"))
        assert xid["source"] == "nvml"


class TestFaults:
    def test_nvml_that_hangs(self, agent: Running, gpus: StandIn) -> None:
        agent.start()
        sampled(agent)
        gpus.set_state("* hang 1")
        (silent,) = until(lambda: agent.portal.events("gpu.silent"))
        assert time.time() - silent["since"] < 30
        before = len(agent.portal.batches())
        agent.kmsg.append(FALLEN)
        until(lambda: agent.portal.events("xid"))
        until(lambda: len(agent.portal.batches()) > before + 1)
        assert agent.portal.batches()[-1]["host"]
        gpus.set_state("")
        (answers,) = until(lambda: agent.portal.events("gpu.answers"))
        assert answers["since"] == silent["since"]

    def test_it_ends_at_once_while_nvml_hangs(self, agent: Running, gpus: StandIn) -> None:
        gpus.set_state("* hang 1")
        agent.start()
        child = agent.reader()
        assert agent.end() < 10, "within 2 s on a machine that has time"
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)

    def test_a_child_that_is_killed_is_replaced(self, agent: Running) -> None:
        agent.start()
        sampled(agent)
        for _ in range(2):
            child = agent.reader()
            child.kill()
            until(lambda child=child: agent.reader().pid != child.pid)
        before = len(_full(agent))
        sampled(agent, before + 2)
        assert len(agent.portal.events("facts")) == 1, "nothing has changed"

    def test_a_portal_that_is_away_for_a_while(self, agent: Running) -> None:
        agent.start()
        sampled(agent)
        agent.portal.stop()
        agent.kmsg.append(FALLEN)
        until(lambda: "cannot be reached" in agent.log)
        until(lambda: len(list(agent.state.rglob("*.jsonl*"))) >= 1)
        time.sleep(12 * PERIOD_S)  # so that a window ends meanwhile
        agent.kill()
        agent.start()
        agent.portal.start()
        until(lambda: counted(agent) == 1)
        before = len(agent.portal.batches())
        until(lambda: len(agent.portal.batches()) > before)
        taken = [item.number for item in agent.portal.taken]
        assert taken == list(range(len(taken)))

    def test_a_portal_that_hangs_holds_up_no_sample(self, agent: Running) -> None:
        agent.start()
        sampled(agent)
        agent.portal.hold.set()
        time.sleep(30 * PERIOD_S)
        agent.portal.hold.clear()
        until(lambda: len(_full(agent)) >= 5)
        ats = [batch["at"] for batch in agent.portal.batches()]
        assert ats == sorted(set(ats))
        assert max(b - a for a, b in zip(ats, ats[1:], strict=False)) < 3 * 10 * PERIOD_S

    def test_a_suspended_process_continues_with_the_current_time(self, agent: Running) -> None:
        process = agent.start()
        before = len(sampled(agent))
        process.send_signal(signal.SIGSTOP)
        time.sleep(25 * PERIOD_S)
        process.send_signal(signal.SIGCONT)
        sampled(agent, before + 4)
        ats = [batch["at"] for batch in agent.portal.batches()]
        assert ats == sorted(set(ats))
        assert abs(ats[-1] - time.time()) < 5

    def test_a_full_disk(self, agent: Running, small_disk: Path) -> None:
        agent.state = small_disk / "state"
        agent.environment["VIGIL_AGENT_STATE"] = str(agent.state)
        agent.start()
        sampled(agent)
        filler = occupy(small_disk)
        until(lambda: "cannot be written (No space left on device)" in agent.log)
        agent.kmsg.append(FALLEN)
        until(lambda: counted(agent) == 1)
        before = len(_full(agent))
        sampled(agent, before + 2)
        filler.unlink()
        sampled(agent, len(_full(agent)) + 2)
        agent.end()
        taken = [item.number for item in agent.portal.taken]
        assert taken == list(range(len(taken)))
        assert counted(agent) == 1

    def test_a_second_agent_is_refused(self, agent: Running) -> None:
        agent.start()
        sampled(agent)
        second = agent.run()
        assert second.returncode == 1
        assert "Another agent writes to" in second.stderr

    def test_a_mount_that_hangs(self, agent: Running, tmp_path: Path) -> None:
        try:
            with hanging(tmp_path / "m") as system:
                path = str(system.path)
                agent.start(VIGIL_AGENT_MOUNTS=path)
                (slow,) = until(lambda: agent.portal.events("mount.slow"))
                assert "since" in slow
                until(lambda: None in _mount_ms(agent))
                sampled(agent, len(_full(agent)) + 1)
                system.well.set()
                until(lambda: agent.portal.events("mount.well"))
                until(lambda: _mount_ms(agent)[-1] is not None)
                system.well.clear()
                assert agent.end() < 10
        except NoFuse:
            pytest.skip("no FUSE here")

    def test_wrong_settings_end_it_with_a_sentence(self, agent: Running) -> None:
        refused = agent.run(VIGIL_AGENT_URL="vigil.lab")
        assert refused.returncode == 1
        assert "VIGIL_AGENT_URL is 'vigil.lab'. Set it to the portal's address" in refused.stderr
        assert agent.run("--nonsense").returncode == 2
        assert agent.run("--help").returncode == 0


def _mount_ms(agent: Running) -> list[Any]:
    hosts = [batch["host"] for batch in agent.portal.batches()]
    return [value for host in hosts for name, value in host.items() if name.startswith("mount_ms:")]
