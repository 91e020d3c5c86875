"""Turn the GPU reader's reports into samples, events and processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpus.reader import GpuReader
from gpus.reports import (
    DriverEvent,
    GpuCounters,
    GpuInfo,
    GpuInventory,
    GpuLost,
    GpuRecovered,
    GpuReport,
    GpuSamples,
    NvmlAbsent,
    NvmlResponding,
    NvmlSilent,
)
from nodes.agent.cleaning import clean
from nodes.agent.gpus.history import GpuHistory
from nodes.agent.gpus.samples import SampleWindow

STALE_SECONDS = 30.0  # older counters no longer describe the running processes
GENERATION = "pcie_generation"
WORKING_PERCENT = 50  # of the time: an idle GPU lowers its PCIe generation
Event = dict[str, Any]


@dataclass
class GpuWatch:
    """Follow this node's GPUs. Call `poll` often; it never waits. `on_xid` receives NVML's reports of Xids."""

    reader: GpuReader
    remembered: GpuHistory
    samples: SampleWindow
    on_xid: Callable[[DriverEvent], None]
    counters: GpuCounters | None = None
    absent: NvmlAbsent | None = None
    is_silent: bool = False
    has_changed: bool = False
    """Whether the facts changed since they were last reported."""
    gpus: tuple[GpuInfo, ...] = ()
    lost: set[str] = field(default_factory=set)
    """GPUs that a previous agent, or an earlier list of NVML's, lost: their samples mean that they are back."""
    silent_since: float | None = None
    """Since when NVML was silent, as reported by the previous agent."""
    _lost_here: set[str] = field(default_factory=set)
    """GPUs that this agent reported as lost."""
    _sent_counters: dict[str, Event] = field(default_factory=dict)
    _working: set[str] = field(default_factory=set)
    """GPUs that worked when they were last sampled."""
    _pcie_generations: dict[str, Any] = field(default_factory=dict)
    """By GPU: when it last worked, since the driver was loaded."""

    def poll(self) -> list[Event]:
        return [event for report in self.reader.poll() for event in self._process(report)]

    @property
    def is_initialised(self) -> bool:
        """Return whether NVML has listed the GPUs, or reported that there are none."""
        return self.reader.inventory is not None or self.absent is not None

    @property
    def newest_counters(self) -> GpuCounters | None:
        counters = self.counters
        return counters if counters and time.monotonic() - counters.at < STALE_SECONDS else None

    def uuid_at(self, bus: str) -> str:
        return self.remembered.uuid_at(bus)

    def described_gpus(self) -> list[Event]:
        """Return the GPUs for the facts; while NVML cannot be queried, those that were there before."""
        if self.reader.inventory is not None and (self.absent is None):
            return [gpu.as_payload() for gpu in self.gpus]
        return [] if self.absent is not None and not self.absent.may_change else self.remembered.gpus

    def _process(self, report: GpuReport) -> list[Event]:
        match report:
            case GpuSamples():
                by_uuid = {
                    gpu.uuid: sample
                    for gpu, sample in zip(self.gpus, report.samples, strict=False)
                    if gpu.uuid and sample
                }
                self.samples.add(report.time, by_uuid)
                self._working = {
                    uuid for uuid, sample in by_uuid.items() if (sample.get("gpu_percent") or 0) >= WORKING_PERCENT
                }
                return self._ended_conditions(report, by_uuid)
            case GpuCounters():
                self.counters = report
                return self._changed_counters(report)
            case DriverEvent():
                if report.kind == "xid":
                    self.on_xid(report)
                return []
            case GpuInventory():
                return self._machine(report)
            case NvmlAbsent():
                self.absent, self.has_changed = report, True
                return []
            case GpuLost() | GpuRecovered():
                gpu = self._identified(report.gpu)
                self.lost.discard(gpu.uuid)
                (self._lost_here.add if isinstance(report, GpuLost) else self._lost_here.discard)(gpu.uuid)
                return [
                    {
                        "kind": "gpu.lost" if isinstance(report, GpuLost) else "gpu.back",
                        "at": report.time,
                        **_identity(gpu),
                    }
                ]
            case NvmlSilent():
                self.is_silent, self.silent_since = True, None
                return [{"kind": "gpu.silent", "at": time.time(), "since": report.since}]
            case NvmlResponding():
                self.is_silent = False
                return [{"kind": "gpu.answers", "at": time.time(), "since": report.since, "seconds": report.seconds}]

    def _ended_conditions(self, samples: GpuSamples, by_uuid: Mapping[str, object]) -> list[Event]:
        """Return events for conditions that lasted when the previous agent ended, and no longer do."""
        back = [gpu for gpu in self.gpus if gpu.uuid in self.lost & by_uuid.keys()]
        self.lost -= by_uuid.keys()
        self._lost_here -= by_uuid.keys()
        events: list[Event] = [{"kind": "gpu.back", "at": samples.time, **_identity(gpu)} for gpu in back]
        if self.silent_since is not None:
            since, self.silent_since = self.silent_since, None
            seconds = round(max(samples.time - since, 0.0), 1)
            events.append({"kind": "gpu.answers", "at": samples.time, "since": since, "seconds": seconds})
        return events

    def _machine(self, inventory: GpuInventory) -> list[Event]:
        self.absent, self.has_changed = None, True
        before, self.gpus = self.gpus, tuple(inventory.gpus)
        self.gpus = tuple(self._identified(gpu) for gpu in inventory.gpus)
        self.remembered.note([gpu.as_payload() for gpu in self.gpus])
        reloaded = {"kind": "driver.reloaded", "at": time.time(), "driver": inventory.driver}
        if inventory.reopened:  # the portal forgets what was counted before
            self._sent_counters.clear()
            self._pcie_generations.clear()
        return [*([reloaded] if inventory.reopened else []), *self._vanished(before)]

    def _vanished(self, before: tuple[GpuInfo, ...]) -> list[Event]:
        """Report GPUs that NVML listed before and no longer does: they are lost, whether it called them so or not.

        If none is left, the driver has a problem, not each GPU. Another GPU in the slot means that it was replaced.
        """
        listed = {gpu.uuid for gpu in self.gpus}
        gone = [gpu for gpu in before if gpu.uuid and gpu.uuid not in listed] if listed - {""} else []
        self.lost |= {gpu.uuid for gpu in gone}
        occupied = {gpu.bus for gpu in self.gpus}
        new = [gpu for gpu in gone if gpu.uuid not in self._lost_here and gpu.bus not in occupied]
        self._lost_here |= {gpu.uuid for gpu in new}
        return [{"kind": "gpu.lost", "at": time.time(), "reason": "vanished", **_identity(gpu)} for gpu in new]

    def _identified(self, gpu: GpuInfo) -> GpuInfo:
        """Identify a GPU that was lost before it was first read, if exactly one known GPU is missing."""
        missing = self.remembered.missing({gpu_info.uuid for gpu_info in self.gpus})
        if gpu.uuid or len(missing) != 1:
            return gpu
        uuid, bus, name = (clean(str(missing[0].get(part, "")), 96) for part in ("uuid", "bus", "name"))
        return replace(gpu, uuid=uuid, bus=bus, name=name)

    def _changed_counters(self, report: GpuCounters) -> list[Event]:
        """Return events for GPUs whose slow counters differ from those last sent."""
        events = []
        for gpu, read in zip(self.gpus, report.counters, strict=False):
            counters = self._with_working_generation(gpu.uuid, read)
            steady = counters if gpu.uuid in self._pcie_generations else _without_generation(counters)
            if gpu.uuid and steady and steady != self._sent_counters.get(gpu.uuid):
                self._sent_counters[gpu.uuid] = steady
                events.append({"kind": "gpu.counters", "at": report.time, "gpu": gpu.uuid, **counters})
        return events

    def _with_working_generation(self, uuid: str, counters: Mapping[str, Any]) -> Event:
        """Return the counters with the PCIe generation at which the GPU last worked, if it has."""
        if GENERATION not in counters:
            return dict(counters)
        if uuid in self._working:
            self._pcie_generations[uuid] = counters[GENERATION]
        return {**counters, GENERATION: self._pcie_generations.get(uuid, counters[GENERATION])}


def _without_generation(counters: Mapping[str, Any]) -> Event:
    """Return what changes only if something happens: while a GPU idles its PCIe generation goes up and down."""
    return {name: value for name, value in counters.items() if name != GENERATION}


def _identity(gpu: GpuInfo) -> Event:
    """Return the fields that identify the GPU in an event."""
    fields = {"gpu": gpu.uuid, "index": gpu.index, "bus": gpu.bus, "name": gpu.name}
    return {name: value for name, value in fields.items() if value not in ("", None)}
