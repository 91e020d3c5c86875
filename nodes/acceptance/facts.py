"""Read what agents report about a node's configuration. Nothing in it is trusted: texts and lists are bounded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodes.health import temperature
from vigil_core import untrusted

MAX_GPUS, MAX_MOUNTS, MAX_LINKS = 64, 64, 64
POWER_BRAKE = 0x80
"""NVML's HwPowerBrakeSlowdown: the machine's power supply asks the GPU to slow down."""
WORKING_PERCENT = 50
LASTING_LOW = 15
"""Observations at work, one every 20 s, after which a low PCIe generation is no chance."""


@dataclass(frozen=True, kw_only=True)
class GpuConfiguration:
    """Describes one GPU as its agent reports it. None: not reported."""

    uuid: str
    index: int
    model: str = ""
    vbios: str = ""
    memory_mib: int | None = None
    power_cap_watts: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    nvlinks: tuple[bool, ...] | None = None
    """Whether each is active. Empty: its counters name none, which is also so if the driver cannot read one of them."""
    has_ecc: bool | None = None
    is_slowed: bool = False
    """By heat or a power brake, now."""
    is_working: bool = False

    def with_peaks(self, peaks: GpuPeaks) -> GpuConfiguration:
        return replace(
            self,
            pcie_generation=peaks.low_generation or peaks.pcie_generation,
            is_slowed=peaks.is_slowed,
            is_working=peaks.is_working,
        )


@dataclass(frozen=True)
class GpuPeaks:
    """What was observed of a GPU over the tests: a GPU lowers its PCIe generation while it idles.

    `low_observations`: how many in a row, while it worked, found less than the full generation. A few may be those of a
    moment in which it idled; `low_generation` is the lowest that lasted.
    """

    pcie_generation: int | None = None
    is_slowed: bool = False
    is_working: bool = False
    low_observations: int = 0
    low_generation: int | None = None

    def merged(self, gpu: GpuConfiguration) -> GpuPeaks:
        """Return the peaks with one more observation."""
        found = replace(
            self, is_slowed=self.is_slowed or gpu.is_slowed, is_working=self.is_working or gpu.is_working
        )  # fmt: skip
        generation = gpu.pcie_generation
        if not gpu.is_working or generation is None:
            return found
        low = self.low_observations + 1 if generation < (gpu.pcie_generation_most or 0) else 0
        lowest = min(self.low_generation or generation, generation) if low >= LASTING_LOW else self.low_generation
        highest = max(self.pcie_generation or generation, generation)
        return replace(found, pcie_generation=highest, low_observations=low, low_generation=lowest)


@dataclass(frozen=True, kw_only=True)
class NodeConfiguration:
    """One node. `mounts`: the source by path, "" where a watched path is not mounted."""

    node: str
    expected_gpus: int = 0
    """As many as the scheduler, the agent at the start, or the tests found: the largest of these numbers."""
    scheduler_gpus: int = 0
    is_reporting: bool = False
    has_token: bool = False
    driver: str = ""
    kernel: str = ""
    gpus: tuple[GpuConfiguration, ...] = ()
    topology: tuple[tuple[str, ...], ...] = ()
    mounts: Mapping[str, str] | None = None
    slow_mounts: tuple[str, ...] = ()
    clock_offset_s: float | None = None
    memlock_bytes: int | None = None
    """-1: no limit."""
    open_files: int | None = None
    shm_bytes: int | None = None


def read_gpu(
    uuid: str, index: int, facts: Mapping[str, Any], counters: Mapping[str, Any], newest: Any
) -> GpuConfiguration:
    """Return a GPU from its stored facts, slow counters and newest sample."""
    sample = newest if isinstance(newest, dict) else {}
    throttle = untrusted.count(sample.get("throttle")) or 0
    return GpuConfiguration(
        uuid=uuid,
        index=index,
        model=untrusted.line(facts.get("name"), 100),
        vbios=untrusted.line(facts.get("vbios"), 64),
        memory_mib=untrusted.count(facts.get("memory_mib")),
        power_cap_watts=untrusted.count(counters.get("power_cap_watts", facts.get("power_cap_watts"))),
        pcie_width=untrusted.count(counters.get("pcie_width")),
        pcie_width_most=untrusted.count(counters.get("pcie_width_most")),
        pcie_generation=untrusted.count(counters.get("pcie_generation")),
        pcie_generation_most=untrusted.count(counters.get("pcie_generation_most")),
        nvlinks=_nvlinks(counters),
        has_ecc=untrusted.count(counters.get("ecc_uncorrected")) is not None if counters else None,
        is_slowed=temperature.is_throttled(throttle) or bool(throttle & POWER_BRAKE),
        is_working=(untrusted.number(sample.get("gpu_percent")) or 0) >= WORKING_PERCENT,
    )


def _nvlinks(counters: Mapping[str, Any]) -> tuple[bool, ...] | None:
    links = counters.get("nvlinks")
    if isinstance(links, list):
        return tuple(bool(link) for link in links[:MAX_LINKS])
    return () if counters else None


def read_mounts(facts: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the source of each watched mount by its path; None if the agent reports no mounts."""
    rows = facts.get("mounts")
    if not isinstance(rows, list) or not rows:
        return None
    return {
        path: untrusted.line(row.get("source"), 200)
        for row in rows[:MAX_MOUNTS]
        if isinstance(row, dict) and (path := untrusted.name(row.get("mount"), 200))
    }


def read_topology(facts: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return how each pair of GPUs is connected, as `nvidia-smi topo` shows it; empty if that is not reported."""
    rows = facts.get("topology")
    if not isinstance(rows, list):
        return ()
    return tuple(
        tuple(untrusted.line(link, 8) for link in row[:MAX_GPUS]) for row in rows[:MAX_GPUS] if isinstance(row, list)
    )


def merge_peaks(peaks: Mapping[str, GpuPeaks], gpus: Iterable[GpuConfiguration]) -> dict[str, GpuPeaks]:
    """Return the peaks by UUID after one more observation of these GPUs."""
    return {**peaks, **{gpu.uuid: peaks.get(gpu.uuid, GpuPeaks()).merged(gpu) for gpu in gpus}}
