"""Test detecting GPUs once, and what a child process leaves behind when its parent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pynvml
import pytest

from gpus import detection
from gpus.reports import DriverEvent, GpuCounters, GpuInfo, GpuInventory, GpuSamples, NvmlAbsent, ReportParser
from tests.nvml import StandIn, uuid
from tests.waiting import until

ROOT = Path(__file__).parents[2]


def test_present_gpus_are_listed(nvml: StandIn) -> None:
    nvml.set_state("* count 2")
    machine = detection.detect(seconds=60)
    assert machine is not None
    assert [(gpu.index, gpu.uuid) for gpu in machine.gpus] == [(0, uuid(0)), (1, uuid(1))]
    assert detection.has_driver()


def test_a_driver_that_hangs_is_not_waited_for(nvml: StandIn) -> None:
    nvml.set_state("* hang 1")
    began = time.monotonic()
    assert detection.detect(seconds=0.5) is None
    assert time.monotonic() - began < 30


def test_a_driver_that_is_not_loaded_lists_no_gpu(nvml: StandIn) -> None:
    nvml.set_state("* init !9")
    assert detection.detect(seconds=60) is None


def test_whether_there_is_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if any(map(os.path.exists, detection.DRIVER_FILES)):
        pytest.skip("here is a driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not detection.has_driver()
    tool = tmp_path / "nvidia-smi"
    tool.touch(0o755)
    assert detection.has_driver(), "it is loaded by who asks first"


def test_killed_parents_leave_no_child_though_the_driver_hangs(nvml: StandIn) -> None:
    program = (
        "import time; from gpus.reader import GpuReader; reader = GpuReader(every=0.1)\n"
        "while True: reader.poll(); print(*reader.pids, flush=True); time.sleep(0.02)"
    )
    nvml.set_state("* hang 1")
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout as output:
        child = psutil.Process(int(until(lambda: output.readline().strip())))
        until(lambda: "libnvidia-ml" in Path(f"/proc/{child.pid}/maps").read_text())
        child.send_signal(signal.SIGTERM)  # as Slurm sends it to all of a job
        assert child.is_running()
        parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_detection_from_an_archive(nvml: StandIn, tmp_path: Path) -> None:
    """Test it as an agent runs it: the child process is found where its reader is."""
    archive = tmp_path / "agent.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        for path in (ROOT / "gpus").glob("*.py"):
            file.write(path, f"gpus/{path.name}")
        file.write(pynvml.__file__, "pynvml.py")
    program = (
        f"import sys; sys.path[:0] = [{str(archive)!r}]\n"
        "from gpus import detection, reader; machine = detection.detect(seconds=60)\n"
        "print(reader.__file__, reader.environment()['PYTHONPATH'], len(machine.gpus))"
    )
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{archive}/gpus/reader.py", str(archive), "8"]


# The lines.


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"NVRM: something",
        b"{",
        b"[]",
        b"7",
        b'{"gpus": 7}',
        b'{"gpus": [7]}',
        b'{"at": 1, "time": 2, "looks": 7}',
        b'{"at": 1, "time": 2, "looks": [7]}',
        b'{"at": "x", "time": 2, "looks": []}',
        b'{"at": 1, "time": 2, "counters": [{}]}',
        b'{"at": 1, "time": 2, "event": {"place": 0, "kind": "xid", "value": 79}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_foreign_lines_in_the_output_of_the_child_are_ignored(line: bytes) -> None:
    assert ReportParser().parse(line) is None


def test_lines_in_words() -> None:
    lines = ReportParser()
    assert lines.parse(b'{"none": "why", "later": false}') == NvmlAbsent("why", may_change=False)
    machine = lines.parse(b'{"gpus": [{"gpu": "0", "uuid": "GPU-a", "from_later": 1}], "driver": "1"}')
    assert machine == GpuInventory((GpuInfo("0", uuid="GPU-a"),), driver="1")
    assert lines.parse(b'{"at": 1, "time": 2, "looks": [{"lost": true}, {"watts": 3}]}') == GpuSamples(
        1.0, 2.0, (None, {"watts": 3})
    )
    assert lines.parse(b'{"at": 1, "time": 2, "counters": [{}], "processes": [null]}') == GpuCounters(
        1.0, 2.0, ({},), (None,)
    )
    event = lines.parse(b'{"at": 1, "time": 2, "event": {"place": 0, "kind": "xid", "value": 79}}')
    assert event == DriverEvent(1.0, 2.0, GpuInfo("0", uuid="GPU-a"), "xid", 79)
    assert lines.parse(b'{"at": 1, "time": 2, "event": {"place": 9, "kind": "xid", "value": 79}}') is None
    lost = lines.parse(b'{"gpus": [{"gpu": "0"}, {"gpu": "1"}]}')
    assert isinstance(lost, GpuInventory)
    assert [gpu.uuid for gpu in lost.gpus] == ["GPU-a", ""]
