"""Test what the agent reports about GPUs, given what NVML's reader reports to it."""

from __future__ import annotations

from pathlib import Path

from gpus.reader import GpuReader
from gpus.reports import GpuCounters, GpuInfo, GpuInventory, GpuReport
from nodes.agent.gpus.history import GpuHistory
from nodes.agent.gpus.samples import SampleWindow
from nodes.agent.gpus.watch import GpuWatch


class ScriptedReader(GpuReader):
    """Reports what a test gives it."""

    reports: tuple[GpuReport, ...] = ()

    def poll(self) -> list[GpuReport]:
        return list(self.reports)


def test_counters_are_sent_again_after_the_driver_was_reloaded(tmp_path: Path) -> None:
    """Unchanged ones, too: the portal forgets those of before."""
    reader = ScriptedReader(every=1.0)
    watch = GpuWatch(reader, GpuHistory(tmp_path), SampleWindow(1.0), lambda event: None)
    counted = GpuCounters(1.0, 1.0, ({"remapped_failed": 1},), ((),))

    def kinds(*reports: GpuReport) -> list[str]:
        reader.reports = reports
        return [event["kind"] for event in watch.poll()]

    gpus = (GpuInfo("0", "GPU-1", 0),)
    assert kinds(GpuInventory(gpus), counted, counted) == ["gpu.counters"]
    assert kinds(GpuInventory(gpus), counted) == []
    assert kinds(GpuInventory(gpus, reopened=True), counted) == ["driver.reloaded", "gpu.counters"]
