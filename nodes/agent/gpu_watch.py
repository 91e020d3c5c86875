"""What the reader of GPUs tells, as samples, events and processes."""

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
from nodes.agent.remembered import Remembered
from nodes.agent.samples import Samples

STALE_SECONDS = 30.0  # counters that are older tell of no process
RESTLESS = frozenset({"pcie_generation"})  # a GPU lowers it while it idles
Event = dict[str, Any]


@dataclass
class GpuWatch:
    """`tend` often; it never waits. `hear_xid` is told of NVML's own word for an Xid."""

    reader: GpuReader
    remembered: Remembered
    samples: Samples
    hear_xid: Callable[[DriverEvent], None]
    counters: GpuCounters | None = None
    absent: NvmlAbsent | None = None
    is_silent: bool = False
    has_changed: bool = False
    """Whether facts are another, for whoever tells them."""
    gpus: tuple[GpuInfo, ...] = ()
    lost: set[str] = field(default_factory=set)
    """GPUs that an agent before this one has told are lost."""
    silent_since: float | None = None
    """Since when NVML was silent, by its word."""
    _told: dict[str, Event] = field(default_factory=dict)

    def tend(self) -> list[Event]:
        return [event for told in self.reader.poll() for event in self._take(told)]

    @property
    def is_known(self) -> bool:
        """Whether NVML has said what there is, or that there is nothing."""
        return self.reader.machine is not None or self.absent is not None

    @property
    def newest_counters(self) -> GpuCounters | None:
        told = self.counters
        return told if told and time.monotonic() - told.at < STALE_SECONDS else None

    def uuid_at(self, bus: str) -> str:
        return self.remembered.uuid_at(bus)

    def known(self) -> list[Event]:
        """The GPUs as facts tell them; while nobody can ask, those that were there."""
        if self.reader.machine is not None and (self.absent is None):
            return [gpu.as_payload() for gpu in self.gpus]
        return [] if self.absent is not None and not self.absent.may_change else self.remembered.gpus

    def _take(self, told: GpuReport) -> list[Event]:
        match told:
            case GpuSamples():
                seen = {gpu.uuid: look for gpu, look in zip(self.gpus, told.samples, strict=False) if gpu.uuid and look}
                self.samples.add(told.time, seen)
                return self._ended(told, seen)
            case GpuCounters():
                self.counters = told
                return self._changed(told)
            case DriverEvent():
                if told.kind == "xid":
                    self.hear_xid(told)
                return []
            case GpuInventory():
                return self._machine(told)
            case NvmlAbsent():
                self.absent, self.has_changed = told, True
                return []
            case GpuLost() | GpuRecovered():
                gpu = self._named(told.gpu)
                self.lost.discard(gpu.uuid)
                return [
                    {"kind": "gpu.lost" if isinstance(told, GpuLost) else "gpu.back", "at": told.time, **_about(gpu)}
                ]
            case NvmlSilent():
                self.is_silent, self.silent_since = True, None
                return [{"kind": "gpu.silent", "at": time.time(), "since": told.since}]
            case NvmlResponding():
                self.is_silent = False
                return [{"kind": "gpu.answers", "at": time.time(), "since": told.since, "seconds": told.seconds}]

    def _ended(self, told: GpuSamples, seen: Mapping[str, object]) -> list[Event]:
        """What lasted when the agent before this one ended, and does no more."""
        back = [gpu for gpu in self.gpus if gpu.uuid in self.lost & seen.keys()]
        self.lost -= seen.keys()
        events: list[Event] = [{"kind": "gpu.back", "at": told.time, **_about(gpu)} for gpu in back]
        if self.silent_since is not None:
            since, self.silent_since = self.silent_since, None
            seconds = round(max(told.time - since, 0.0), 1)
            events.append({"kind": "gpu.answers", "at": told.time, "since": since, "seconds": seconds})
        return events

    def _machine(self, told: GpuInventory) -> list[Event]:
        self.absent, self.has_changed = None, True
        self.gpus = tuple(told.gpus)
        self.gpus = tuple(self._named(gpu) for gpu in told.gpus)
        self.remembered.note([gpu.as_payload() for gpu in self.gpus])
        return [{"kind": "driver.reloaded", "at": time.time(), "driver": told.driver}] if told.reopened else []

    def _named(self, gpu: GpuInfo) -> GpuInfo:
        """One that was lost before anybody asked tells nothing of itself: if only one is missing, it is that."""
        missing = self.remembered.missing({one.uuid for one in self.gpus})
        if gpu.uuid or len(missing) != 1:
            return gpu
        uuid, bus, name = (clean(str(missing[0].get(part, "")), 96) for part in ("uuid", "bus", "name"))
        return replace(gpu, uuid=uuid, bus=bus, name=name)

    def _changed(self, told: GpuCounters) -> list[Event]:
        """Slow counters of the GPUs that have others than they told last."""
        events = []
        for gpu, counters in zip(self.gpus, told.counters, strict=False):
            steady = {name: value for name, value in counters.items() if name not in RESTLESS}
            if gpu.uuid and steady and steady != self._told.get(gpu.uuid):
                self._told[gpu.uuid] = steady
                events.append({"kind": "gpu.counters", "at": told.time, "gpu": gpu.uuid, **counters})
        return events


def _about(gpu: GpuInfo) -> Event:
    """Which GPU an event is of."""
    named = {"gpu": gpu.uuid, "index": gpu.index, "bus": gpu.bus, "name": gpu.name}
    return {name: value for name, value in named.items() if value not in ("", None)}
