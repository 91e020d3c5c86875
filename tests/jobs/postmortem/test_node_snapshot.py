"""Test the last snapshot of each node: what was full, what the kernel killed, and whose process it was."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from django.utils import timezone
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnosis.signs import node_snapshot, rank_exits
from tests.examples import examples
from tests.jobs.postmortem.attempt_files import ALONE, OOM, XID, Left, texts

pytestmark = pytest.mark.django_db


class TestSnapshot:
    def test_a_rank_killed_for_memory(self, left: Left) -> None:
        left.ends(1, r1=(None, 9, 0.5))
        left.write_snapshot(0)
        left.write_snapshot(1, memory={"oom_kills": 1, "peak_mib": 65_536, "limit_mib": 65_536})
        incident, report = left.diagnosed()
        assert (incident.cause, incident.rank, incident.node) == ("memory.host_oom", 1, "dgx-02")
        assert texts(report, "root") == ["a process was killed for memory: 64.0 of 64.0 GiB were used at the most"]
        assert report["confidence"] > 0.9

    def test_a_kill_that_was_not_for_memory(self, left: Left) -> None:
        left.ends(1, r1=(None, 9, 0.5))
        left.write_snapshot(0)
        left.write_snapshot(1)
        incident, report = left.diagnosed()
        assert (incident.cause, report["runner_up"]) == ("unknown", None)
        assert "memory.host_oom" in [item["cause"] for item in report["ruled_out"]]

    def test_a_kernel_that_counts_no_kills(self, left: Left) -> None:
        left.ends(1, r1=(None, 9, 0.5))
        left.write_snapshot(1, memory={"oom_kills": None, "peak_mib": 1023, "limit_mib": 1024})
        incident, report = left.diagnosed()
        assert (incident.cause, report["confidence"]) == ("memory.host_oom", 0.75)
        assert "memory was full: 1.0 of 1.0 GiB were used at the most" in texts(report, "confirmation")

    def test_memory_of_others_in_the_same_group(self, left: Left) -> None:
        left.ends(1, r1=(1, None, 0.5))
        left.write_snapshot(1, memory={"oom_kills": 1, "has_others": True})
        assert left.diagnosed()[0].cause != "memory.host_oom"

    def test_shared_memory_that_was_full(self, left: Left) -> None:
        left.ends(1, r1=(None, signal.SIGBUS, 0.5))
        left.write_snapshot(1, shm={"total_mib": 64, "most_mib": 64})
        assert left.diagnosed()[0].cause == "memory.shm"

    @pytest.mark.parametrize(
        "disk",
        [
            {"free_mib": 0, "problem": "ENOSPC"},
            {"free_mib": 700, "problem": "EDQUOT"},
            {"free_mib": 700, "inodes": 9, "inodes_free": 0, "problem": ""},
        ],
    )
    def test_a_disk_so_full_that_no_log_mentions_it(self, left: Left, disk: dict[str, Any]) -> None:
        left.write("logs/0.1.log", "")
        left.ends(1, r1=(1, None, 0.5))
        left.write_snapshot(1, disk=disk)
        incident, report = left.diagnosed()
        assert (incident.cause, incident.node) == ("storage.full", "dgx-02")
        assert report["confidence"] == 0.75

    @pytest.mark.parametrize("bus", ["00000000:AB:00.0", "0000:ab:00.0", "AB:00.0"])
    def test_kernel_messages_go_through_the_catalogue(self, left: Left, bus: str) -> None:
        now = timezone.now().timestamp()
        left.ends(1, r1=(1, None, 0.5))
        left.write_snapshot(0)
        left.write_snapshot(1, kernel=[[now - 5, XID]], gpus=[bus])
        incident, report = left.diagnosed()
        assert (incident.cause, incident.node) == ("gpu.off_bus", "dgx-02")
        root = next(item for item in report["evidence"] if item["role"] == "root")
        assert root["file"] == "snapshot of dgx-02: kernel"
        assert abs(root["at"] - (now - 5)) < 0.01

    def test_messages_about_another_jobs_gpu_or_process_are_left_out(self, left: Left) -> None:
        now = timezone.now().timestamp()
        left.ends(1, r1=(1, None, 0.5))
        left.write_snapshot(1, kernel=[[now - 5, XID], [now - 4, OOM]], gpus=["00000000:17:00.0"])
        assert left.diagnosed()[0].cause == "unknown"

    def test_of_a_process_of_this_job_it_counts(self, left: Left) -> None:
        left.ends(1, r1=(None, 9, 0.5), r242=(None, 9, 0.4))
        left.write_snapshot(1, kernel=[[timezone.now().timestamp() - 4, OOM]])
        assert left.diagnosed()[0].cause == "memory.host_oom"

    @pytest.mark.parametrize(
        ("ago", "group", "cause"),
        [(4, "/job_7/step_0", "memory.host_oom"), (4, "/job_8/step_0", "unknown"), (300, "/job_7/step_0", "unknown")],
        ids=["in its group", "in another's", "before it began"],
    )
    def test_where_and_when_it_killed_shows_the_owner(self, left: Left, ago: int, group: str, cause: str) -> None:
        """Some kernels count no kills, and ranks may have started the killed process themselves."""
        kill = f"oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg={group},task_memcg={group},task=python,pid=4242,uid=0"
        at = timezone.now().timestamp() - ago
        left.ends(1, r1=(None, 9, 0.5))
        block = ("python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0", " out_of_memory+0x214/0x500")
        messages = (*block, "memory: usage 65536kB, limit 65536kB, failcnt 19", kill, OOM)
        left.write_snapshot(1, kernel=[[at, line] for line in messages], memory={"path": "/job_7", "oom_kills": None})
        assert left.diagnosed()[0].cause == cause

    def test_of_many_restarts_the_failed_restart(self, left: Left) -> None:
        """Sorted by name, 10.0 would come before 2.0."""
        for number in range(11):
            left.ends(0, incarnation=number, r0=(40 + number, None, 1.0))
            left.write_snapshot(0, incarnation=number)
        left.write("logs/10.0.log", ALONE)
        _, report = left.diagnosed()
        assert "rank 0 ended with exit code 50" in texts(report, "root")[0]
        assert "memory and disk of dgx-02: no snapshot was taken" in report["not_seen"]

    @pytest.mark.parametrize(("bus_of_gpu", "cause"), [("AB", "gpu.ecc"), ("17", "unknown")])
    def test_what_a_driver_reported_of_its_gpus(self, left: Left, bus_of_gpu: str, cause: str) -> None:
        left.ends(1, r1=(1, None, 0.5))
        text = "\n==============NVSMI LOG==============\n\nDriver Version : 570.86.15\n"
        for bus, failed in (("17", "No"), ("AB", "Yes")):
            text += (
                f"\nGPU 00000000:{bus}:00.0\n    Remapped Rows\n        Remapping Failure Occurred        : {failed}\n"
            )
        left.write_snapshot(1, nvidia_smi=text, gpus=[f"00000000:{bus_of_gpu}:00.0"])
        assert left.diagnosed()[0].cause == cause

    def test_it_lists_what_it_could_not_see(self, left: Left) -> None:
        left.ends(1, r1=(1, None, 0.5))
        left.write_snapshot(0, not_seen={"kernel": "/dev/kmsg: Operation not permitted"})
        left.write_snapshot(1, not_seen={"kernel": "/dev/kmsg: Operation not permitted"})
        _, report = left.diagnosed()
        assert "kernel (/dev/kmsg: Operation not permitted) on dgx-01, dgx-02" in report["not_seen"]

    @settings(max_examples=examples(60), deadline=None)
    @given(
        content=st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=4)
                | st.dictionaries(
                    st.sampled_from(
                        ["memory", "shm", "disk", "kernel", "gpus", "not_seen", "at", "version", "ranks", "rank"]
                    ),
                    inner,
                    max_size=5,
                )
            ),
            max_leaves=20,
        )
    )
    def test_whatever_stands_in_the_files(self, content: object) -> None:
        table = {
            "version": 1,
            "at": 5.0,
            **(content if isinstance(content, dict) else {"kernel": content, "ranks": content}),
        }
        ends = rank_exits.parse_exits(table, node="a")
        snapshot = node_snapshot.parse_snapshot(table | {"version": 1, "at": 5.0}, node="a")
        assert snapshot is not None
        node_snapshot.signs_of_snapshot(snapshot, ends)
        rank_exits.signs_of_exits(ends)
        for log in node_snapshot.logs_of_snapshot(snapshot, ends):
            log.close()
