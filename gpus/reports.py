"""Define the reports about GPUs: the child's output lines (gpus.nvml), typed, and events that the reader derives.

Samples, counters and processes of a GPU are at its index in the newest GpuInventory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

MAX_GPUS = 64
MAX_PROCESSES = 500

GpuSample = Mapping[str, int] | None
"""Values by column (protocols.md §11), without unavailable ones. None: the GPU is lost."""


@dataclass(frozen=True)
class GpuInfo:
    """Identity and static facts of one GPU. None or empty: unknown, as for a GPU lost before it was first read."""

    gpu: str
    """How it was requested: an index or a UUID, as in CUDA_VISIBLE_DEVICES."""
    uuid: str = ""
    index: int | None = None
    minor: int | None = None
    bus: str = ""
    name: str = ""
    memory_mib: int | None = None
    parent: str = ""
    """For a MIG slice: the UUID of the GPU that it is part of."""
    # The rest is only read with `detailed`.
    serial: str = ""
    vbios: str = ""
    inforom: str = ""
    power_cap_watts: int | None = None
    slowdown_c: int | None = None
    numa_node: int | None = None
    mig: bool | None = None
    instances: tuple[Mapping[str, Any], ...] = ()
    """Its slices if `mig`: uuid, name, memory_mib, gpu_instance, compute_instance."""

    def as_payload(self) -> dict[str, Any]:
        """Return the known fields, for an event."""
        values = {gpu_field.name: getattr(self, gpu_field.name) for gpu_field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value not in ("", ())}


@dataclass(frozen=True)
class GpuInventory:
    """The node's GPUs and driver: reported at the start of each child, and again whenever they change."""

    gpus: tuple[GpuInfo, ...]
    driver: str = ""
    cuda: str = ""
    nvml: str = ""
    topology: tuple[tuple[str, ...], ...] = ()
    """In nvidia-smi's terms, [a][b]: X, NV18, PIX, PXB, PHB, NODE, SYS; "" is unknown."""
    reopened: bool = False
    """NVML was reopened: the driver was reloaded, or a GPU was reset."""


@dataclass(frozen=True)
class GpuSamples:
    """The current values of all GPUs. `at` is the system's monotonic clock, `time` is Unix time."""

    at: float
    time: float
    samples: tuple[GpuSample, ...]


@dataclass(frozen=True)
class GpuCounters:
    """Slow counters, and the processes on each GPU: {"pid", "memory_mib", "gpu_instance"}.

    `counters` by name: ecc_corrected, ecc_uncorrected (since the driver was loaded), ecc_corrected_lifetime,
    ecc_uncorrected_lifetime, sram_threshold_exceeded, remapped_corrected, remapped_uncorrected, remapped_pending,
    remapped_failed, retired_corrected, retired_uncorrected (pages of GPUs before Ampere), pcie_replays,
    pcie_generation, pcie_generation_most, pcie_width, pcie_width_most, power_cap_watts,
    recovery_action, and nvlinks, a list of 0 and 1. A GPU lowers its PCIe generation while it idles.
    """

    at: float
    time: float
    counters: tuple[Mapping[str, Any], ...]
    processes: tuple[tuple[Mapping[str, int], ...] | None, ...]
    """None: not available for this GPU."""


@dataclass(frozen=True)
class DriverEvent:
    """An NVML event of one GPU: `xid`, `recovery`, `mig` or `ecc`, reported once between two samples."""

    at: float
    time: float
    gpu: GpuInfo
    kind: str
    value: int
    """The Xid; 999 is one that NVML does not know and only the kernel log identifies."""


@dataclass(frozen=True)
class NvmlAbsent:
    """There is no NVML, or no driver that responds to it; reported once until there is one."""

    why: str
    may_change: bool
    """Whether it is tried again, at growing intervals; otherwise no child is started any more."""


@dataclass(frozen=True)
class NvmlSilent:
    """NVML has not responded since (Unix time)."""

    since: float


@dataclass(frozen=True)
class NvmlReopening:
    """NVML is being reopened: its driver was reloaded or a GPU was reset. For the reader, not for its clients."""


@dataclass(frozen=True)
class NvmlResponding:
    """NVML responds again, after `seconds`."""

    since: float
    seconds: float


@dataclass(frozen=True)
class GpuLost:
    """A GPU reports only that it is lost; `gpu` is what was known of it before."""

    at: float
    time: float
    index: int
    """Its index in the newest GpuInventory."""
    gpu: GpuInfo


@dataclass(frozen=True)
class GpuRecovered:
    """A lost GPU reports again."""

    at: float
    time: float
    index: int
    """Its index in the newest GpuInventory."""
    gpu: GpuInfo


GpuReport = (
    GpuInventory
    | GpuSamples
    | GpuCounters
    | DriverEvent
    | NvmlAbsent
    | NvmlSilent
    | NvmlResponding
    | GpuLost
    | GpuRecovered
)


@dataclass
class ReportParser:
    """Parse a child's output lines into reports; keeps the inventory that they refer to."""

    inventory: GpuInventory | None = None
    _gpus_by_name: dict[str, GpuInfo] = field(default_factory=dict)

    def parse(self, line: bytes) -> GpuReport | NvmlReopening | None:
        """Return the report in a line; None if it is not from the child: a library may print anything."""
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            document = json.loads(line)
            if "none" in document:
                return NvmlAbsent(str(document["none"])[:1000], bool(document.get("later")))
            if "gpus" in document:
                return self._inventory(document)
            if "reopening" in document:
                return NvmlReopening()
            at, time = float(document["at"]), float(document["time"])
            if "looks" in document:
                return GpuSamples(at, time, tuple(_sample(gpu_sample) for gpu_sample in document["looks"]))
            if "counters" in document:
                processes = tuple(
                    None if some is None else tuple(some[:MAX_PROCESSES]) for some in document["processes"]
                )
                return GpuCounters(at, time, tuple(document["counters"]), processes)
            if self.inventory is not None:
                event = document["event"]
                return DriverEvent(at, time, self.inventory.gpus[event["place"]], event["kind"], int(event["value"]))
        return None

    def _inventory(self, document: dict[str, Any]) -> GpuInventory:
        gpus = tuple(self._gpu(gpu) for gpu in document["gpus"][:MAX_GPUS])
        self._gpus_by_name = {gpu.gpu: gpu for gpu in gpus}
        topology = tuple(tuple(map(str, row)) for row in document.get("topology", ()))
        texts = {name: str(document.get(name) or "") for name in ("driver", "cuda", "nvml")}
        self.inventory = GpuInventory(gpus, topology=topology, reopened=bool(document.get("reopened")), **texts)
        return self.inventory

    def _gpu(self, document: dict[str, Any]) -> GpuInfo:
        """Return the GPU; a lost one reports nothing about itself, so use what an earlier child knew by this name."""
        values = {
            gpu_field.name: document[gpu_field.name]
            for gpu_field in fields(GpuInfo)
            if document.get(gpu_field.name) is not None
        }
        gpu = GpuInfo(**{**values, "instances": tuple(values.get("instances", ()))})
        return gpu if gpu.uuid else self._gpus_by_name.get(gpu.gpu, gpu)


def _sample(sample: dict[str, int]) -> GpuSample:
    return None if sample.get("lost") else sample
