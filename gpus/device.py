"""Read one GPU in the child process: identity, samples, slow counters and processes."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from gpus import facts
from gpus.facts import watts, without_missing
from gpus.queries import ALL_LINKS, NvmlQueries
from gpus.rates import CounterRates, GpmActivity
from gpus.reports import MAX_PROCESSES

SM_CLOCK = 1
NO_INSTANCE = 0xFFFF_FFFF
# A 32-bit counter wraps several times a second on a busy bus: its rates would be wrong.
MIN_64_BIT_COUNT = 2**32

FAST = {
    "memory_temperature_c": (82, 0),
    "nvlink_tx_kib": (138, ALL_LINKS),
    "nvlink_rx_kib": (139, ALL_LINKS),
    "nvlink_tx_bytes": (202, ALL_LINKS),  # these two from Blackwell on
    "nvlink_rx_bytes": (204, ALL_LINKS),
    "pcie_tx_bytes": (197, 0),
    "pcie_rx_bytes": (198, 0),
}
RECOVERY = {"recovery_action": (230, 0)}
ECC = {
    "ecc_corrected": (0, 0),
    "ecc_uncorrected": (1, 0),
    "ecc_corrected_lifetime": (0, 1),
    "ecc_uncorrected_lifetime": (1, 1),
}
RETIRED = {"retired_corrected": 0, "retired_uncorrected": 1}  # nvmlPageRetirementCause_t
REMAPPED = ("remapped_corrected", "remapped_uncorrected", "remapped_pending", "remapped_failed")
PLAIN = {
    "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_generation_most": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_most": "nvmlDeviceGetMaxPcieLinkWidth",
}


class GpuDevice:
    """One GPU as NVML sees it: what it is, its counters, and its newest values."""

    def __init__(self, name: str) -> None:
        self.queries = NvmlQueries()
        self._name = name
        self._activity: GpmActivity | None = None
        self._rates = CounterRates()
        self._identity: dict[str, Any] = {"gpu": name, **({"index": int(name)} if name.isdecimal() else {})}
        self._slices: dict[str, Any] = {}

    def open(self) -> None:
        """Open the GPU if it is not; call it again for a lost GPU, which may be back."""
        if self.queries.handle is None:
            self.queries.is_lost = False
            self.queries.open(self._name)
        if self.queries.handle is not None and self._activity is None:
            self._activity = GpmActivity(self.queries)

    def describe(self, *, detailed: bool) -> dict[str, Any]:
        """Return what the GPU is. Its names are requested until they are known: a lost GPU reports none."""
        if "uuid" not in self._identity:
            self._identity.update(facts.names(self.queries))
        if detailed:
            self._slices = facts.slices(self.queries)
            self._identity.update(facts.static(self.queries))
        return {**self._identity, **self._slices}

    def has_changed(self, *, slices: bool) -> bool:
        """Return whether the description changed: names became available, or `slices` differ."""
        if "uuid" not in self._identity:
            self.open()
            self._identity.update(facts.names(self.queries))
            return "uuid" in self._identity
        if slices and facts.slices(self.queries) not in ({}, self._slices):
            self.queries.retry_unsupported()
            return True
        return False

    def sample(self, at: float) -> dict[str, Any]:
        """Return the current values; a MIG slice reports neither utilisation nor power."""
        if self.queries.handle is None:
            return {"lost": True} if self.queries.is_lost else {}
        self.queries.is_lost = False
        query, memory = self.queries.first_available, facts.memory(self.queries)
        utilisation = query("nvmlDeviceGetUtilizationRates")
        found = {
            "gpu_percent": utilisation.gpu if utilisation else None,
            "memory_mib": memory.used // facts.MIB if memory else None,
            "temperature_c": query("nvmlDeviceGetTemperature", more=(facts.GPU_SENSOR,)),
            "watts": watts(query("nvmlDeviceGetPowerUsage")),
            "sm_mhz": query("nvmlDeviceGetClockInfo", more=(SM_CLOCK,)),
            "throttle": query("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            **self._field_values(at),
        }
        if self.queries.is_lost:
            return {"lost": True}
        return {name: round(value) for name, value in found.items() if value is not None}

    def counters(self) -> dict[str, Any]:
        query = self.queries.first_available
        return without_missing(
            {
                **{name: query("nvmlDeviceGetTotalEccErrors", more=which) for name, which in ECC.items()},
                **dict(zip(REMAPPED, query("nvmlDeviceGetRemappedRows") or (), strict=False)),
                **self._retired_pages(),
                **{name: query(function) for name, function in PLAIN.items()},
                **{name: int(value) for name, value in self.queries.fields(RECOVERY).items()},
                "sram_threshold_exceeded": self._sram_threshold_exceeded(),
                "power_cap_watts": watts(query("nvmlDeviceGetEnforcedPowerLimit")),
                "nvlinks": facts.links(self.queries) or None,
            }
        )

    def _retired_pages(self) -> dict[str, int]:
        """Return how many memory pages are retired, by cause: GPUs before Ampere, which remap no rows."""
        found = {
            name: self.queries.first_available("nvmlDeviceGetRetiredPages", more=(cause,))
            for name, cause in RETIRED.items()
        }
        return {name: len(pages) for name, pages in found.items() if isinstance(pages, list)}

    def processes(self) -> list[dict[str, int]] | None:
        """Return the compute processes on the GPU; None if the driver does not report them."""
        found = self.queries.first_available(
            "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"
        )
        return None if found is None else [_process(process) for process in found[:MAX_PROCESSES]]

    def _field_values(self, at: float) -> dict[str, float | None]:
        """Return the values that need field values, or two samples."""
        values = self.queries.fields(FAST)
        activity = self._activity.sample() if self._activity else {}
        return {
            "memory_temperature_c": values.get("memory_temperature_c"),
            **{f"nvlink_{way}_mib": self._nvlink(way, values, at) for way in ("tx", "rx")},
            **{f"pcie_{way}_mib": self._pcie(way, values, at) for way in ("tx", "rx")},
            **activity,
        }

    def _nvlink(self, way: str, values: dict[str, float], at: float) -> float | None:
        kib = self._rates.rate(f"nvlink_{way}_kib", values.get(f"nvlink_{way}_kib"), at)
        counted = self._rates.rate(f"nvlink_{way}_bytes", values.get(f"nvlink_{way}_bytes"), at)
        if kib is not None:
            return kib / 2**10
        return None if counted is None else counted / 2**20

    def _pcie(self, way: str, values: dict[str, float], at: float) -> float | None:
        count = values.get(f"pcie_{way}_bytes", 0)
        rate = self._rates.rate(f"pcie_{way}_bytes", count if count >= MIN_64_BIT_COUNT else None, at)
        return None if rate is None else rate / 2**20

    def _sram_threshold_exceeded(self) -> int | None:
        """Return 1 if its memory has exceeded NVIDIA's SRAM error threshold for a replacement, else 0."""
        if not hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
            return None
        status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        result = self.queries.first_available("nvmlDeviceGetSramEccErrorStatus", more=(ctypes.byref(status),))
        return None if result is None else int(status.bThresholdExceeded)


def _process(process: Any) -> dict[str, int]:
    memory, instance = process.usedGpuMemory, process.gpuInstanceId
    return without_missing(
        {
            "pid": process.pid,
            "memory_mib": None if memory is None else memory // facts.MIB,
            "gpu_instance": None if instance in (None, NO_INSTANCE) else instance,
        }
    )
