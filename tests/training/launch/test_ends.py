"""Test a launcher's report of every rank's end, and of its node after a failed incarnation."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.launching import ENDLESS, Run, accident
from tests.waiting import PATIENCE_S, until
from training.attempt.files import read_json
from training.launch import control_group, node_report
from training.launch.disk_reserve import DiskReserve

GIB = 1 << 30
KILLED = "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9437184kB"
ENDS = """
import os, signal, time
rank = os.environ["RANK"]
if rank == "0":
    held = bytearray(96 << 20)
    for at in range(0, len(held), 4096):
        held[at] = 1
    print("ready", flush=True)
    time.sleep(600)
elif rank == "1":
    while not os.path.exists("go"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def ends_of(run: Run, incarnation: int = 0, node: int = 0) -> dict[int, dict[str, Any]]:
    payload = json.loads((run.attempt() / "ends" / f"{incarnation}.{node}.json").read_text())
    return {rank["rank"]: rank for rank in payload["ranks"]}


def node_report_of(run: Run, incarnation: int = 0, node: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.attempt() / "looks" / f"{incarnation}.{node}.json").read_text())
    return found


@pytest.mark.slow
def test_every_rank_of_a_script_and_who_ended_it(run: Run) -> None:
    launcher = run.script(ENDS, ranks=3, launch="in_place = 0\n")
    until(lambda: "ready" in run.rank_log())
    (run.path / "job" / "code" / "go").touch()
    assert launcher.wait(PATIENCE_S) == 128 + signal.SIGSEGV
    ends = ends_of(run)
    assert (ends[1]["signal"], ends[1]["by_us"]) == (signal.SIGSEGV, False)
    assert (ends[0]["signal"], ends[0]["by_us"]) == (signal.SIGKILL, True)
    assert (ends[2]["exit_code"], ends[2]["signal"], ends[2]["by_us"]) == (0, None, False)
    assert 96 <= ends[0]["peak_mib"] < 1024
    assert time.time() - PATIENCE_S < ends[1]["ended_at"] <= ends[0]["ended_at"] <= time.time()
    (event,) = run.events("ranks.ended")
    assert (event["incarnation"], event["node"], event["left_out"]) == (0, "dgx01", 0)
    assert [rank["rank"] for rank in event["ranks"]][0] == 1, "who failed by itself comes first"
    assert {rank["rank"]: rank for rank in event["ranks"]} == ends
    run.assert_nothing_left()


@pytest.mark.slow
def test_an_event_and_a_file_per_incarnation_and_a_node_report_after_a_failure(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_text(f"6,1,{int(time.monotonic() * 1e6)},-;{KILLED}\n")
    (tmp_path / "groups").mkdir()
    for name, text in (("cgroup.controllers", "memory"), ("memory.events", "oom_kill 3\n"), ("memory.max", "max")):
        (tmp_path / "groups" / name).write_text(text)
    run.describe('kind = "distributed"\n[launch]\nranks_per_node = 2\n')
    accidents = [accident(1, 12, "kill")]
    environment = {"VIGIL_KMSG": str(tmp_path / "kmsg"), "VIGIL_CGROUPS": str(tmp_path / "groups")}
    body = json.dumps({"steps": 40, "checkpoint_every": 5, "accidents": accidents})
    assert run.launch(body, environment=environment).wait(PATIENCE_S) == 0
    assert [event["incarnation"] for event in run.events("ranks.ended")] == [0, 1]
    assert (ends_of(run)[1]["signal"], ends_of(run)[1]["by_us"]) == (signal.SIGKILL, False)
    assert {item["exit_code"] for item in ends_of(run, 1).values()} == {0}
    reading = node_report_of(run)
    assert (reading["incarnation"], reading["node"], reading["node_rank"]) == (0, "dgx01", 0)
    assert [text for _, text in reading["kernel"]] == [KILLED]
    assert (reading["memory"]["oom_kills"], reading["memory"]["version"]) == (0, 2), "three were there before it began"
    assert reading["disk"]["problem"] == ""
    assert reading["disk"]["free_mib"] > 0
    assert reading["shm"]["total_mib"] >= reading["shm"]["most_mib"] >= 0
    assert os.listdir(run.attempt() / "looks") == ["0.0.json"], "none of the one that ended well, no room kept"


@pytest.mark.slow
def test_a_driver_that_hangs_holds_up_nobody(run: Run, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho half of it\nexec sleep 600\n")
    program.chmod(0o755)
    run.describe('kind = "distributed"\n[launch]\nranks_per_node = 2\ngpus_per_node = 2\nin_place = 1\n')
    body = json.dumps({"steps": 40, "accidents": [accident(1, 12, "kill", incarnation="any")]})
    began = time.monotonic()
    launcher = run.launch(body, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert launcher.wait(PATIENCE_S) == 137
    assert time.monotonic() - began < PATIENCE_S / 2
    _, again = run.events("incarnation.started")
    ended = (run.attempt() / "looks" / "0.0.json").stat().st_mtime
    assert float(again["time"]) < ended, "the next incarnation waited for the look"
    reading = node_report_of(run)
    assert reading["nvidia_smi"] == "half of it\n"
    assert reading["not_seen"]["nvidia-smi"] == "it did not end within 3 s"
    run.assert_nothing_left()


@pytest.mark.slow
def test_no_node_report_after_a_requested_stop(run: Run) -> None:
    launcher = run.fake(steps=ENDLESS)
    run.started()
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    assert set(ends_of(run)) == {0, 1}
    assert not list((run.attempt() / "looks").glob("*.json"))


class TestRoom:
    """A disk that is full by then."""

    def test_reports_use_the_reserved_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        disk_reserve = DiskReserve(tmp_path, "ends/.reserve.0")
        disk_reserve.reserve()

        def is_full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(Path, "write_text", is_full)
            assert disk_reserve.write(Path("ends/0.0.json"), "[" + "1," * 9000 + "1]", "[1]")
            assert not disk_reserve.write(Path("ends/1.0.json"), "[]"), "the room is used up"
        assert json.loads((tmp_path / "ends" / "0.0.json").read_text()) == [1]
        disk_reserve.release()
        assert os.listdir(tmp_path / "ends") == ["0.0.json"]


class TestControlGroups:
    @pytest.fixture
    def root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("VIGIL_CGROUPS", str(tmp_path))
        return tmp_path

    def test_version_2_with_the_limit_above(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control_group, "_path", lambda _: "/slurm/job_7/step_0")
        step = root / "slurm/job_7/step_0"
        step.mkdir(parents=True)
        (root / "cgroup.controllers").write_text("memory\n")
        (step / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\n")
        (step / "memory.max").write_text("max\n")
        (step / "memory.peak").write_text(f"{3 * GIB}\n")
        (step.parent / "memory.max").write_text(f"{4 * GIB}\n")
        (step.parent / "memory.peak").write_text(f"{4 * GIB}\n")
        found = control_group.read()
        assert found is not None
        assert (found.version, found.path, found.oom_kills) == (2, "/slurm/job_7/step_0", 2)
        assert (found.peak_mib, found.limit_mib) == (4096, 4096)

    def test_version_1(self, root: Path) -> None:
        group = root / "memory"
        group.mkdir()
        (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
        (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (group / "memory.max_usage_in_bytes").write_text(f"{GIB}\n")
        found = control_group.read()
        assert found is not None
        assert (found.version, found.oom_kills, found.peak_mib, found.limit_mib) == (1, 1, 1024, None)

    def test_none(self, root: Path) -> None:
        assert control_group.read() is None
        assert not control_group.has_others()


class TestNodeReport:
    def test_only_kernel_messages_of_the_last_ten_minutes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = time.monotonic()
        lines = [
            (6, now - 3600, "long ago"),
            (14, now - 5, "a program's"),
            (3, now - 5, KILLED),
            (3, now - 4, "x" * 9000),
        ]
        log = tmp_path / "kmsg"
        text = "".join(
            f"{level},{n},{int(at * 1e6)},-;{message}\n DEVICE=x\n" for n, (level, at, message) in enumerate(lines)
        )
        log.write_text(f"rubbish\n;\n,,,;\n{text}")
        monkeypatch.setenv("VIGIL_KMSG", str(log))
        ((at, message), (_, cut)), problem = node_report.kernel_log()
        assert (message, problem) == (KILLED, "")
        assert abs(at - (time.time() - 5)) < 2
        assert len(cut) == node_report.LINE_BYTES

    def test_a_flood_is_cut_to_its_newest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at = int(time.monotonic() * 1e6)
        (tmp_path / "kmsg").write_text("".join(f"3,{n},{at},-;{n:05d} {'x' * 500}\n" for n in range(3000)))
        monkeypatch.setenv("VIGIL_KMSG", str(tmp_path / "kmsg"))
        found, problem = node_report.kernel_log()
        assert found[-1][1].startswith("02999")
        assert sum(len(text) for _, text in found) <= node_report.KERNEL_BYTES
        assert problem == "only the newest lines were kept", "so a missing message proves nothing"

    @pytest.fixture
    def query(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """Return a query about a node with a message of the kernel."""
        (tmp_path / "kmsg").write_text(f"3,1,{int(time.monotonic() * 1e6)},-;{KILLED}\n")
        monkeypatch.setenv("VIGIL_KMSG", str(tmp_path / "kmsg"))
        (tmp_path / node_report.FOLDER).mkdir()
        about = {"incarnation": 0, "node": "dgx01", "node_rank": 0, "shm": {"total_mib": 64, "most_mib": 3}}
        return {"folder": str(tmp_path), "reserve": "looks/.reserve.0", "asks_driver": False, **about}

    def test_quick_facts_are_reported_whatever_happens_to_the_rest(
        self, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hangs(_: Path) -> None:
            raise KeyboardInterrupt  # as its time is over

        monkeypatch.setattr(node_report, "disk", hangs)
        with pytest.raises(KeyboardInterrupt):
            node_report.write_report(**query)
        payload = json.loads(Path(query["folder"], "looks", "0.0.json").read_text())
        assert (payload["node"], payload["shm"]["most_mib"]) == ("dgx01", 3)
        assert [text for _, text in payload["kernel"]] == [KILLED]
        assert payload["not_seen"] == {"disk": "it had not answered"}

    @pytest.mark.parametrize("has_kernel_log", [True, False])
    def test_facts_without_space_are_listed_as_missing(
        self, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch, has_kernel_log: bool
    ) -> None:
        if not has_kernel_log:
            Path(os.environ["VIGIL_KMSG"]).write_text("")
        DiskReserve(Path(query["folder"]), query["reserve"]).reserve()

        def is_full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(node_report, "write_json", is_full)
        monkeypatch.setattr(Path, "write_text", is_full)
        assert node_report.write_report(**query)
        payload = json.loads(Path(query["folder"], "looks", "0.0.json").read_text())
        assert payload["not_seen"] == ({"kernel": "no room"} if has_kernel_log else {})
        assert payload["disk"]["free_mib"] > 0

    def test_a_disk_that_takes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / node_report.FOLDER).mkdir()
        assert node_report.disk(tmp_path)["problem"] == ""

        def over_quota(_: int) -> None:
            raise OSError(122, "Disk quota exceeded")

        monkeypatch.setattr(os, "fsync", over_quota)
        assert node_report.disk(tmp_path)["problem"] == "EDQUOT"
        assert not os.listdir(tmp_path / node_report.FOLDER)

    def test_what_is_no_json_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "0.0.json").write_text("{")
        assert read_json(tmp_path / "0.0.json") is None
