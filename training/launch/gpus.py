"""Sample the job's GPUs on this node through a separate reader process (gpus.reader), and report their events.

A call into NVIDIA's driver may hang unkillably: the launcher makes none itself and never waits for the reader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from gpus.reader import OPENING_SECONDS, RETRY_SECONDS, SILENT_SECONDS, GpuReader
from gpus.reports import MAX_GPUS, GpuInfo, GpuInventory, GpuLost, GpuReport, NvmlResponding, NvmlSilent
from training.units import GIB, MIB

NAMED = ("uuid", "index", "minor", "bus", "name", "parent")
MAX_GPU_EVENTS = 100  # times that one attempt reports its list of GPUs

Emit = Callable[..., None]
"""Emits an event of the launcher: its type, and its fields as keywords."""


def gpu_names(count: int, visible: str) -> list[str]:
    """Return `count` GPUs by the names in CUDA_VISIBLE_DEVICES, or by index where that is empty."""
    return ([part.strip() for part in visible.split(",") if part.strip()] or [str(i) for i in range(count)])[:MAX_GPUS]


class GpuMonitor:
    """`poll` often, `sample` when a sample is due; neither blocks."""

    def __init__(
        self,
        names: list[str],
        *,
        every: float,
        emit: Emit,
        opening_seconds: float = OPENING_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """`names`: as in CUDA_VISIBLE_DEVICES; empty: no GPUs to read. `every`: seconds between two samples."""
        self._names, self._every, self._emit = names, max(every, 0.1), emit
        self._reader = GpuReader(
            names,
            every=self._every,
            opening_seconds=opening_seconds,
            silent_seconds=silent_seconds,
            retry_seconds=retry_seconds,
        )
        self._reported: list[dict[str, Any]] = []
        self._report_count = 0

    @property
    def pids(self) -> list[int]:
        """Process ids of readers that have not ended."""
        return self._reader.pids

    @property
    def inventory(self) -> GpuInventory | None:
        return self._reader.inventory

    @property
    def buses(self) -> list[str]:
        """PCI bus ids of the job's GPUs, as far as they are known."""
        return [gpu.bus for gpu in self.inventory.gpus if gpu.bus] if self.inventory else []

    def poll(self) -> None:
        """Process the reader's messages, notice silence, start a reader where none runs."""
        for message in self._reader.poll():
            self._handle(message)

    def sample(self) -> dict[str, float]:
        """Return mean utilisation, total memory and total power of the job's GPUs; {} without a current sample.

        A lost GPU counts as idle in the mean. Values that no GPU reports are left out.
        """
        newest = self._reader.newest
        if newest is None or time.monotonic() - newest.at > 2 * self._every + 1.0:
            return {}
        samples = [values if values is not None else {"gpu_percent": 0} for values in newest.samples]
        percent, memory_mib, watts = (_column(samples, name) for name in ("gpu_percent", "memory_mib", "watts"))
        totals = {"gpu_percent": sum(percent) / len(percent)} if percent else {}
        if memory_mib:
            totals["gpu_memory_gib"] = sum(memory_mib) * MIB / GIB
        if watts:
            totals["gpu_watts"] = float(sum(watts))
        return totals

    def close(self) -> None:
        """Kill the readers without waiting for them."""
        self._reader.close()

    def _handle(self, message: GpuReport) -> None:
        match message:
            case GpuInventory():
                self._report_gpus(message)
            case GpuLost():
                names = {name: value for name, value in _names(message.gpu).items() if name in ("name", "uuid", "bus")}
                self._emit("gpu.lost", gpu=message.gpu.gpu, of=len(self._names), local_rank=message.index, **names)
            case NvmlSilent():
                self._emit("gpu.silent", since=message.since, gpus=self._names)
            case NvmlResponding():
                self._emit("gpu.answers", since=message.since, seconds=message.seconds)

    def _report_gpus(self, inventory: GpuInventory) -> None:
        """Report the GPUs once they are known, and again when the list changes.

        Slurm and NVML may number them differently.
        """
        gpus = [{"local_rank": index, **_names(gpu)} for index, gpu in enumerate(inventory.gpus)]
        if gpus != self._reported and any(gpu.uuid for gpu in inventory.gpus) and self._report_count < MAX_GPU_EVENTS:
            self._reported, self._report_count = gpus, self._report_count + 1
            self._emit("gpus", gpus=gpus)


def _column(samples: list[Mapping[str, int]], name: str) -> list[int]:
    return [values[name] for values in samples if name in values]


def _names(gpu: GpuInfo) -> dict[str, Any]:
    return {name: value for name, value in gpu.as_payload().items() if name in NAMED}
