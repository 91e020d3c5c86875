"""What is told of GPUs: the lines that the child prints (gpus.nvml), typed, and what its reader makes of its silence.

A look, the counters and the processes of a GPU stand at its place, the order of the newest Machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

MOST_GPUS = 64
MOST_PROCESSES = 500

Look = Mapping[str, int] | None
"""Columns by their names (protocols.md §11); what is not told is left out. None: the GPU is lost."""


@dataclass(frozen=True)
class Gpu:
    """What one GPU is. None or empty: not told, as of one that was lost before anybody asked."""

    gpu: str
    """How it was asked for: an index or a UUID, as in CUDA_VISIBLE_DEVICES."""
    uuid: str = ""
    index: int | None = None
    minor: int | None = None
    bus: str = ""
    name: str = ""
    memory_mib: int | None = None
    parent: str = ""
    """Of a slice (MIG): the UUID of the GPU that it is a part of."""
    # What follows is told only by a child that tells everything.
    serial: str = ""
    vbios: str = ""
    power_cap_watts: int | None = None
    slowdown_c: int | None = None
    numa_node: int | None = None
    mig: bool | None = None
    instances: tuple[Mapping[str, Any], ...] = ()
    """Its slices while `mig`: uuid, name, memory_mib, gpu_instance, compute_instance."""

    def as_told(self) -> dict[str, Any]:
        """What is known of it, for an event; the rest is left out."""
        known = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in known.items() if value is not None and value not in ("", ())}


@dataclass(frozen=True)
class Machine:
    """What there is: told at the start of each child, and again whenever it has changed."""

    gpus: tuple[Gpu, ...]
    driver: str = ""
    cuda: str = ""
    nvml: str = ""
    topology: tuple[tuple[str, ...], ...] = ()
    """In nvidia-smi's words, [a][b]: X, NV18, PIX, PXB, PHB, NODE, SYS; "" is not told."""
    reopened: bool = False
    """NVML was opened anew since: the driver was loaded again, or a GPU was reset."""


@dataclass(frozen=True)
class Looks:
    """What the GPUs do. `at` is the system's monotonic clock, `time` is Unix time."""

    at: float
    time: float
    looks: tuple[Look, ...]


@dataclass(frozen=True)
class Counters:
    """What changes slowly, with the processes on each GPU: {"pid", "memory_mib", "gpu_instance"}.

    `counters` by name: ecc_corrected, ecc_uncorrected (since the driver was loaded), ecc_corrected_lifetime,
    ecc_uncorrected_lifetime, sram_threshold_exceeded, remapped_corrected, remapped_uncorrected, remapped_pending,
    remapped_failed, pcie_replays, pcie_generation, pcie_generation_most, pcie_width, pcie_width_most, power_cap_watts,
    recovery_action, and nvlinks, a list of 0 and 1. A GPU lowers its PCIe generation while it idles.
    """

    at: float
    time: float
    counters: tuple[Mapping[str, Any], ...]
    processes: tuple[tuple[Mapping[str, int], ...] | None, ...]
    """None: of this GPU they are not told."""


@dataclass(frozen=True)
class DriverEvent:
    """An event of NVML's, of one GPU: `xid`, `recovery`, `mig` or `ecc`, told once between two looks."""

    at: float
    time: float
    gpu: Gpu
    kind: str
    value: int
    """The Xid; 999 is one that NVML does not know, the kernel log does."""


@dataclass(frozen=True)
class Absent:
    """There is no NVML here, or no driver that answers it; told once until there is."""

    why: str
    may_change: bool
    """It is asked again, ever less often; else nothing is started any more."""


@dataclass(frozen=True)
class Silent:
    """NVML has not answered since (Unix time)."""

    since: float


@dataclass(frozen=True)
class Answers:
    """NVML answers again."""

    since: float
    seconds: float


@dataclass(frozen=True)
class Lost:
    """A GPU tells only that it is lost; `gpu` is what was known of it before."""

    at: float
    time: float
    place: int
    gpu: Gpu


@dataclass(frozen=True)
class Back:
    """A GPU that was lost tells again."""

    at: float
    time: float
    place: int
    gpu: Gpu


Told = Machine | Looks | Counters | DriverEvent | Absent | Silent | Answers | Lost | Back


@dataclass
class Lines:
    """Makes what it says of a child's lines; knows the machine that they speak of."""

    machine: Machine | None = None
    _known: dict[str, Gpu] = field(default_factory=dict)

    def read(self, line: bytes) -> Told | None:
        """None for what is no line of the child's: a library may print whatever it likes."""
        with suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            told = json.loads(line)
            if "none" in told:
                return Absent(str(told["none"])[:1000], bool(told.get("later")))
            if "gpus" in told:
                return self._machine(told)
            at, time = float(told["at"]), float(told["time"])
            if "looks" in told:
                return Looks(at, time, tuple(_look(look) for look in told["looks"]))
            if "counters" in told:
                processes = tuple(None if some is None else tuple(some[:MOST_PROCESSES]) for some in told["processes"])
                return Counters(at, time, tuple(told["counters"]), processes)
            if self.machine is not None:
                event = told["event"]
                return DriverEvent(at, time, self.machine.gpus[event["place"]], event["kind"], int(event["value"]))
        return None

    def _machine(self, told: dict[str, Any]) -> Machine:
        gpus = tuple(self._gpu(gpu) for gpu in told["gpus"][:MOST_GPUS])
        self._known = {gpu.gpu: gpu for gpu in gpus}
        topology = tuple(tuple(map(str, row)) for row in told.get("topology", ()))
        texts = {name: str(told.get(name) or "") for name in ("driver", "cuda", "nvml")}
        self.machine = Machine(gpus, topology=topology, reopened=bool(told.get("reopened")), **texts)
        return self.machine

    def _gpu(self, told: dict[str, Any]) -> Gpu:
        """One that is lost tells nothing of itself: then it is what the child before knew by this name."""
        known = {one.name: told[one.name] for one in fields(Gpu) if told.get(one.name) is not None}
        gpu = Gpu(**{**known, "instances": tuple(known.get("instances", ()))})
        return gpu if gpu.uuid else self._known.get(gpu.gpu, gpu)


def _look(told: dict[str, int]) -> Look:
    return None if told.get("lost") else told
