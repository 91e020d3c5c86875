"""Test the GPUs that the local scheduler allocates: as reported by the driver, or as named by the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpus import detection
from nodes.schedulers.base import SchedulerError
from nodes.schedulers.choose import SchedulerSettings, open_scheduler
from nodes.schedulers.local import machine
from nodes.schedulers.local.scheduler import LocalScheduler
from tests.nvml import StandIn, uuid


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let processes that this test starts find two GPUs."""
    library = StandIn(tmp_path)
    library.set_state("* count 2")
    for name, value in library.environment.items():
        monkeypatch.setenv(name, value)
    return library


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ["0", "1"]), ("1", ["1"]), ("none", [])],
)
def test_gpus_are_those_that_the_driver_shows(nvml: StandIn, tmp_path: Path, text: str, expected: list[str]) -> None:
    scheduler = open_scheduler(SchedulerSettings(home=tmp_path, local_gpus=text))
    assert isinstance(scheduler, LocalScheduler)
    assert [gpu.index for gpu in scheduler.gpus] == expected
    assert [(gpu.uuid, gpu.minor) for gpu in scheduler.gpus] == [(uuid(int(index)), int(index)) for index in expected]
    assert scheduler.nodes()[0].gpu_type == ("NVIDIA H100 80GB HBM3" if expected else "")
    with pytest.raises(SchedulerError, match="has no GPU 7"):
        open_scheduler(SchedulerSettings(home=tmp_path, local_gpus="0,7"))


@pytest.mark.parametrize("state", ["* hang 1", "* init !9"], ids=["hangs", "is not loaded"])
def test_a_driver_that_reports_nothing_shows_no_gpus(
    nvml: StandIn, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(machine, "GPU_SECONDS", 0.5)
    nvml.set_state(state)
    assert machine.find_gpus() == ()


def test_without_a_driver_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine.find_gpus():
        pytest.skip("here is a driver")

    def detect(**options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(detection, "detect", detect)
    assert machine.find_gpus() == ()
