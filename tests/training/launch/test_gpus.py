"""Test how the launcher reads and reports the job's GPUs, with a stand-in of NVML (tests/gpus tests the reader)."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.nvml import LIBRARY, StandIn, bus, slice_uuid, uuid
from tests.training.launching import ENDLESS, Run
from tests.waiting import PATIENCE_S, until
from training.launch.gpus import GpuMonitor, gpu_names
from training.provenance import machine

EVERY = 0.1


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let processes that this test starts find two GPUs."""
    library = StandIn(tmp_path)
    library.set_state("* count 2")
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


class Watched:
    """GPUs as a launcher watches them, and the messages it received."""

    def __init__(self, *names: str, silent_seconds: float = 60.0) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.gpus = GpuMonitor(
            list(names),
            every=EVERY,
            emit=self._record,
            opening_seconds=silent_seconds,
            silent_seconds=silent_seconds,
            retry_seconds=(0.05, 0.1),
        )

    def _record(self, kind: str, **data: Any) -> None:
        self.events.append((kind, data))

    def poll(self) -> dict[str, float]:
        began = time.monotonic()
        self.gpus.poll()
        report = self.gpus.sample()
        assert time.monotonic() - began < 30.0, "no poll waits for a driver"
        return report

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        self.poll()
        return [data for name, data in self.events if name == kind]


@pytest.fixture
def watch() -> Iterator[Any]:
    watched: list[Watched] = []

    def start(*names: str, **more: float) -> Watched:
        watched.append(Watched(*names, **more))
        return watched[-1]

    yield start
    for item in watched:
        pids = item.gpus.pids
        item.gpus.close()
        for pid in pids:
            with suppress(OSError):  # those that a test has made unkillable
                os.kill(pid, signal.SIGKILL)
        until(partial(_has_none, item.gpus))


def _has_none(gpus: GpuMonitor) -> bool:
    return not gpus.pids


def test_what_the_gpus_do_together(nvml: StandIn, watch: Any) -> None:
    nvml.set_state("* count 2", "0 gpu_percent 10", "1 gpu_percent 97")
    report = until(watch("0", "1").poll)
    assert report == {"gpu_percent": 53.5, "gpu_memory_gib": 60.0, "gpu_watts": 700.0}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((uuid(0), slice_uuid(1, 4)), {"gpu_percent": 90.0, "gpu_memory_gib": 40.0, "gpu_watts": 350.0}),
        ((slice_uuid(1, 4),), {"gpu_memory_gib": 10.0}),
    ],
    ids=["one of two", "only one"],
)
def test_what_a_gpu_does_not_report_is_not_zero(
    nvml: StandIn, watch: Any, names: tuple[str, ...], expected: dict[str, float]
) -> None:
    """A slice of a GPU (MIG) knows neither its use nor its power."""
    nvml.set_state("* count 2", "1 mig 1", "1 slice 4 20480")
    assert until(watch(*names).poll) == expected


def test_gpus_are_reported_once_and_again_when_they_change(nvml: StandIn, watch: Any) -> None:
    watched = watch("1", uuid(0))
    until(watched.poll)
    h100 = {"name": "NVIDIA H100 80GB HBM3"}
    first = {"local_rank": 0, "uuid": uuid(1), "index": 1, "minor": 1, "bus": bus(1), **h100}
    second = {"local_rank": 1, "uuid": uuid(0), "index": 0, "minor": 0, "bus": bus(0), **h100}
    assert watched.events_of("gpus") == [{"gpus": [first, second]}]
    nvml.set_state("* count 2", "* reload 1")
    until(lambda: watched.events_of("gpus") and watched.gpus.inventory.reopened)
    assert len(watched.events_of("gpus")) == 1, "they are the same as before"
    nvml.set_state("* count 2", "* reload 2", "1 uuid GPU-another")
    assert until(lambda: watched.events_of("gpus")[1:]) == [{"gpus": [{**first, "uuid": "GPU-another"}, second]}]


def test_the_gpu_of_a_slice_is_reported_with_it(nvml: StandIn, watch: Any) -> None:
    nvml.set_state("* count 2", "1 mig 1", "1 slice 4 20480")
    watched = watch(slice_uuid(1, 4))
    ((gpu,),) = [report["gpus"] for report in until(lambda: watched.events_of("gpus"))]
    assert (gpu["uuid"], gpu["parent"]) == (slice_uuid(1, 4), uuid(1))


def test_a_lost_gpu_is_reported_once_and_stays_in_the_mean(nvml: StandIn, watch: Any) -> None:
    nvml.set_state("* count 2", "0 gpu_percent 10", "1 gpu_percent 97")
    watched = watch("0", "1")
    until(watched.poll)
    assert not watched.events_of("gpu.lost")
    nvml.set_state("* count 2", "0 lost 1", "1 gpu_percent 97")
    (lost,) = until(lambda: watched.events_of("gpu.lost"))
    assert lost == {
        "gpu": "0",
        "of": 2,
        "local_rank": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": uuid(0),
        "bus": bus(0),
    }
    assert watched.poll() == {"gpu_percent": 48.5, "gpu_memory_gib": 30.0, "gpu_watts": 350.0}
    nvml.set_state("* count 2")
    until(lambda: watched.poll()["gpu_percent"] == 90.0)
    nvml.set_state("* count 2", "* lost 1")
    until(lambda: [lost["gpu"] for lost in watched.events_of("gpu.lost")] == ["0", "0", "1"])
    assert watched.poll() == {"gpu_percent": 0.0}


def test_a_gpu_that_was_lost_before_is_reported_too(nvml: StandIn, watch: Any) -> None:
    nvml.set_state("* count 2", "1 lost 1")
    watched = watch("0", "1")
    (lost,) = until(lambda: watched.events_of("gpu.lost"))
    assert (lost["gpu"], lost.get("uuid")) == ("1", None)


def test_silence_is_reported_with_its_start_and_its_end(nvml: StandIn, watch: Any) -> None:
    watched = watch("0", "1", silent_seconds=1.0)
    until(watched.poll)
    hung = time.time()
    nvml.set_state("* hang 1")
    (silent,) = until(lambda: watched.events_of("gpu.silent"))
    assert abs(silent["since"] - hung) < 1.0
    assert watched.poll() == {}, "the last known values are no answer any more"
    nvml.set_state()
    (answers,) = until(lambda: watched.events_of("gpu.answers"))
    assert answers["since"] == silent["since"]
    assert watched.poll()["gpu_percent"] == 90.0
    assert len(watched.events_of("gpu.silent")) == 1


def test_without_nvidia_nothing_is_reported_and_nothing_restarted(watch: Any) -> None:
    if machine.gpus(None):
        pytest.skip("here is a driver")
    watched = watch("0")
    until(lambda: watched.gpus.pids or watched.poll())
    until(lambda: watched.poll() == {} and not watched.gpus.pids)
    assert watched.events == []


def test_gpus_are_named_as_ranks_see_them() -> None:
    assert gpu_names(2, "") == ["0", "1"]
    assert gpu_names(2, "3, GPU-5") == ["3", "GPU-5"]


# What an attempt ran with.


@pytest.mark.parametrize(("visible", "names"), [(None, ["H100", "H200"]), ("1", ["H200"]), ("", None)])
def test_gpus_are_those_that_ranks_see(nvml: StandIn, visible: str | None, names: list[str] | None) -> None:
    nvml.set_state("* count 2", "0 name H100", "1 name H200")
    report = machine.gpus(visible)
    assert (report["driver"], report["cuda"]) == ("570.86.15", "12.8")
    assert [gpu["name"] for gpu in report.get("gpus", [])] == (names or [])
    assert all(gpu["memory_gib"] == 80.0 for gpu in report.get("gpus", []))


def test_only_the_gpus_are_missing_when_the_driver_hangs(nvml: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GPU_SECONDS", 0.5)
    nvml.set_state("* hang 1")
    assert machine.gpus(None) == {}


# The launcher.


def _readers(launcher: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher).children() if "nvml" in " ".join(child.cmdline())]


@pytest.mark.slow
def test_a_driver_that_hangs_holds_up_no_launcher(run: Run, nvml: StandIn) -> None:
    """A rank that is lost is noticed, and a stop obeyed, while no call into the driver returns."""
    nvml.set_state("* hang 1")
    run.describe('kind = "distributed"\n[launch]\ngpus_per_node = 2\nsample_seconds = 0.1\n')
    launcher = run.launch(json.dumps({"steps": ENDLESS, "checkpoint_every": 5}), environment=nvml.environment)
    ranks = run.started()
    readers = until(
        lambda: [child for child in psutil.Process(launcher.pid).children() if "nvml" in " ".join(child.cmdline())]
    )
    os.kill(ranks[1], signal.SIGKILL)
    run.started(1)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
    (lost,) = [event for event in run.events("incarnation.ended") if event["incarnation"] == 0]
    again, (request,) = run.events("incarnation.started")[1], run.events("stop.requested")
    assert again["time"] - lost["time"] < 10
    assert request["time"] > again["time"]
    until(lambda: not any(reader.is_running() and reader.status() != psutil.STATUS_ZOMBIE for reader in readers))
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_launcher_loads_no_driver_and_reports_a_lost_gpu(run: Run, nvml: StandIn) -> None:
    nvml.set_state("* count 2", "0 gpu_percent 10", "1 gpu_percent 97")
    run.describe('kind = "distributed"\n[launch]\ngpus_per_node = 2\nsample_seconds = 0.1\n')
    launcher = run.launch(json.dumps({"steps": ENDLESS}), environment=nvml.environment)
    run.started()
    until(lambda: 53.5 in run.series("gpu_percent", rank=-1).get(0, {}).values())
    (event,) = run.events("gpus")
    assert (event["node"], [gpu["uuid"] for gpu in event["gpus"]]) == ("dgx01", [uuid(0), uuid(1)])
    assert LIBRARY not in Path(f"/proc/{launcher.pid}/maps").read_text()
    nvml.set_state("* count 2", "0 lost 1", "1 gpu_percent 97")
    (lost,) = until(lambda: run.events("gpu.lost"))
    assert (lost["node"], lost["uuid"]) == ("dgx01", uuid(0))
    until(lambda: 48.5 in run.series("gpu_percent", rank=-1)[0].values())
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(PATIENCE_S) == 75
