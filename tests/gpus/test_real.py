"""Test the same reader with a real driver, if this machine has one."""

from __future__ import annotations

import pytest

from gpus import detection
from gpus.reports import GpuCounters, GpuInventory, GpuSamples
from tests.gpus.conftest import Watch

pytestmark = pytest.mark.skipif(not detection.has_driver(), reason="here is no driver of NVIDIA's")


def test_reports_of_a_real_driver(watch: Watch) -> None:
    watched = watch(every=1.0)
    machine, counters = watched.first(GpuInventory), watched.first(GpuCounters)
    samples = watched.next(GpuSamples).samples
    assert machine.driver
    assert machine.gpus
    assert len(samples) == len(machine.gpus) == len(counters.counters) == len(machine.topology)
    assert [row[place] for place, row in enumerate(machine.topology)] == ["X"] * len(machine.gpus)
    for gpu, reading in zip(machine.gpus, samples, strict=True):
        assert gpu.uuid.startswith("GPU-")
        assert reading is not None
        assert gpu.memory_mib is not None
        assert 0 <= reading["memory_mib"] <= gpu.memory_mib
        assert 0 <= reading.get("gpu_percent", 0) <= 100
        assert 0 < reading.get("temperature_c", 40) < 120


def test_a_real_gpu_by_its_uuid(watch: Watch) -> None:
    machine = detection.detect(seconds=60)
    assert machine is not None
    report = watch([machine.gpus[0].uuid], every=1.0).first(GpuInventory)
    assert report.gpus[0].index == machine.gpus[0].index
