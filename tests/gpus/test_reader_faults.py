"""Test reports about GPUs and drivers that disappear, hang and return."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gpus.reports import GpuInventory, GpuLost, GpuRecovered, GpuSamples, NvmlAbsent, NvmlResponding, NvmlSilent
from tests.gpus.conftest import STEADY, Watch
from tests.nvml import StandIn, bus, uuid
from tests.waiting import until

pytestmark = pytest.mark.lengthy  # a process each, and what it tells comes by the second


# Lost.


def test_a_lost_gpu_is_reported_with_its_earlier_identity_and_so_is_its_return(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    watched.first(GpuSamples)
    nvml.set_state("3 lost 1")
    lost = watched.first(GpuLost)
    assert (lost.index, lost.gpu.uuid, lost.gpu.bus) == (3, uuid(3), bus(3))
    samples = watched.current().samples
    assert (samples[3], samples[2]) == (None, STEADY)
    nvml.set_state()
    assert watched.first(GpuRecovered).gpu.uuid == uuid(3)
    assert watched.current().samples[3] == STEADY
    nvml.set_state("3 lost 1")
    watched.first(GpuLost)
    assert len(watched.all(GpuLost)) == 1


def test_another_child_knows_a_lost_gpu_no_more_but_its_reader_does(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    watched.first(GpuSamples)
    nvml.set_state("3 lost 1")
    watched.first(GpuLost)
    (child,) = watched.reader.pids
    os.kill(child, signal.SIGKILL)
    again = watched.next(GpuInventory)
    assert watched.reader.pids != [child]
    assert (again.gpus[3].uuid, again.gpus[3].serial) == (uuid(3), "1650000000003")
    assert watched.current().samples[3] is None
    assert not watched.all(GpuRecovered)


def test_a_gpu_lost_before_the_start_is_identified_once_it_is_back(nvml: StandIn, watch: Watch) -> None:
    nvml.set_state("3 lost 1")
    watched = watch()
    assert watched.first(GpuInventory).gpus[3].as_payload() == {"gpu": "3", "index": 3}
    assert watched.first(GpuLost).gpu.index == 3
    nvml.set_state()
    assert until(lambda: [item for item in watched.all(GpuInventory) if item.gpus[3].uuid == uuid(3)])
    assert watched.first(GpuRecovered).gpu.uuid == uuid(3)


def test_another_gpu_in_the_slot(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    watched.first(GpuSamples)
    nvml.set_state("3 lost 1")
    watched.first(GpuLost)
    nvml.set_state("* reload 1", "3 uuid GPU-another")
    assert until(lambda: [item for item in watched.all(GpuInventory) if item.gpus[3].uuid == "GPU-another"])
    assert watched.current().samples[3] == STEADY
    assert not watched.all(GpuRecovered), "the one that was lost is gone"


# Silence.


@pytest.mark.parametrize("gpu", ["*", "3"])
def test_silence_is_reported_with_its_start_and_its_end(nvml: StandIn, watch: Watch, gpu: str) -> None:
    watched = watch(silent_seconds=0.5, opening_seconds=0.5)
    first = watched.first(GpuSamples)
    nvml.set_state(f"{gpu} hang 1")
    # A busy machine is silent now and then by itself; this silence is the one that does not end.
    until(lambda: watched.all(NvmlSilent) and watched.reader.newest is None and watched.reader.silent_since)
    silent = watched.all(NvmlSilent)[-1]
    assert first.time - 1.0 < silent.since < time.time()
    assert watched.reader.silent_since == silent.since
    nvml.set_state()
    (answers,) = until(lambda: [item for item in watched.all(NvmlResponding) if item.since == silent.since])
    assert answers.seconds > 0
    until(lambda: watched.current().samples[0] == STEADY and watched.reader.silent_since is None)
    reports = [item.since for item in watched.reports if isinstance(item, NvmlSilent)]
    assert len(reports) == len(set(reports)), "each is reported once"


@pytest.mark.lengthy
def test_of_children_that_cannot_be_killed_there_are_two(
    nvml: StandIn, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: None)  # as where a driver holds them
        nvml.set_state("* hang 1")
        watched = watch(silent_seconds=0.3, opening_seconds=0.3)
        until(lambda: watched.all(NvmlSilent) and len(watched.reader.pids) == 2)
        deadline = time.monotonic() + 1.5  # in which more would come
        while time.monotonic() < deadline:
            watched.all(NvmlSilent)
            assert len(watched.reader.pids) <= 2
        assert len(watched.all(NvmlSilent)) == 1
    nvml.set_state()  # the driver releases them: a stray child has no reader and ends
    watched.first(NvmlResponding)
    until(lambda: watched.all(GpuSamples) and len(watched.reader.pids) == 1)


def test_a_driver_that_is_away_for_a_while(nvml: StandIn, watch: Watch) -> None:
    """While it is reloaded, NVML reports first that it is not open, then that there is no driver, then no error."""
    watched = watch()
    watched.first(GpuSamples)
    nvml.set_state("* reload 1", "* init !9")
    assert watched.first(NvmlAbsent) == NvmlAbsent("Driver Not Loaded", may_change=True)
    assert watched.reader.absent
    nvml.set_state("* reload 1")
    inventory = watched.next(GpuInventory)
    assert (inventory.gpus[0].uuid, inventory.reopened) == (uuid(0), True)
    assert watched.current().samples[0] == STEADY
    assert watched.reader.absent is None


def test_a_driver_that_takes_long_to_open_again_is_not_silent(nvml: StandIn, watch: Watch) -> None:
    """Without persistence mode a driver initialises every GPU when it is opened, after a reload as at the start."""
    watched = watch(silent_seconds=0.5)
    watched.first(GpuSamples)
    nvml.set_state("* reload 1", "* init 2000")
    assert until(lambda: [item for item in watched.all(GpuInventory) if item.reopened])
    assert not watched.all(NvmlSilent)


def test_a_library_that_is_not_the_drivers(nvml: StandIn, watch: Watch) -> None:
    watched = watch()
    watched.first(GpuSamples)
    nvml.set_state("* call !18")
    assert watched.first(NvmlAbsent) == NvmlAbsent("RM has detected an NVML/RM version mismatch.", may_change=True)
    nvml.set_state()
    watched.next(GpuInventory)
    assert watched.current().samples[0] == STEADY


def test_without_nvml_nothing_is_started_again(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpus import detection

    if detection.has_driver():
        pytest.skip("here is a driver")
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    watched = watch()
    assert not watched.first(NvmlAbsent).may_change
    until(lambda: not watched.all(GpuInventory) and not watched.reader.pids)
    for _ in range(5):
        assert watched.reader.poll() == []
    assert not watched.reader.pids
