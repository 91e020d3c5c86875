"""One GPU as the child knows it: what it is, what it does, what of it changes slowly, who is on it."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from gpus import facts
from gpus.asking import ALL_LINKS, Questions
from gpus.facts import told, watts
from gpus.rates import Activity, Rates
from gpus.told import MOST_PROCESSES

SM_CLOCK = 1
NO_INSTANCE = 0xFFFF_FFFF
# One of 32 bits goes round several times a second on a busy bus: its rates are worse than none.
WIDE_COUNTER = 2**32

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
REMAPPED = ("remapped_corrected", "remapped_uncorrected", "remapped_pending", "remapped_failed")
PLAIN = {
    "pcie_replays": "nvmlDeviceGetPcieReplayCounter",
    "pcie_generation": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_generation_most": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_most": "nvmlDeviceGetMaxPcieLinkWidth",
}


class Device:
    def __init__(self, name: str) -> None:
        self.questions = Questions()
        self._name = name
        self._activity: Activity | None = None
        self._rates = Rates()
        self._known: dict[str, Any] = {"gpu": name, **({"index": int(name)} if name.isdecimal() else {})}
        self._slices: dict[str, Any] = {}

    def open(self) -> None:
        """As often as it takes: a GPU that is lost may be back."""
        if self.questions.handle is None:
            self.questions.is_lost = False
            self.questions.open(self._name)
        if self.questions.handle is not None and self._activity is None:
            self._activity = Activity(self.questions)

    def about(self, *, everything: bool) -> dict[str, Any]:
        """What it is. Its names are asked for until they are told: once lost, it tells none of them."""
        if "uuid" not in self._known:
            self._known.update(facts.names(self.questions))
        if everything:
            self._slices = facts.slices(self.questions)
            self._known.update(facts.static(self.questions))
        return {**self._known, **self._slices}

    def has_changed(self, *, slices: bool) -> bool:
        """Whether it has something else to tell about itself: its names at last, or other `slices`."""
        if "uuid" not in self._known:
            self.open()
            self._known.update(facts.names(self.questions))
            return "uuid" in self._known
        if slices and facts.slices(self.questions) not in ({}, self._slices):
            self.questions.forget()
            return True
        return False

    def look(self, at: float) -> dict[str, Any]:
        """What it does now; a slice (MIG) knows neither its use nor its power."""
        if self.questions.handle is None:
            return {"lost": True} if self.questions.is_lost else {}
        self.questions.is_lost = False
        ask, memory = self.questions.ask, facts.memory(self.questions)
        use = ask("nvmlDeviceGetUtilizationRates")
        found = {
            "gpu_percent": use.gpu if use else None,
            "memory_mib": memory.used // facts.MIB if memory else None,
            "temperature_c": ask("nvmlDeviceGetTemperature", more=(facts.GPU_SENSOR,)),
            "watts": watts(ask("nvmlDeviceGetPowerUsage")),
            "sm_mhz": ask("nvmlDeviceGetClockInfo", more=(SM_CLOCK,)),
            "throttle": ask("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
            **self._measured(at),
        }
        if self.questions.is_lost:
            return {"lost": True}
        return {name: round(value) for name, value in found.items() if value is not None}

    def counters(self) -> dict[str, Any]:
        ask = self.questions.ask
        return told(
            {
                **{name: ask("nvmlDeviceGetTotalEccErrors", more=which) for name, which in ECC.items()},
                **dict(zip(REMAPPED, ask("nvmlDeviceGetRemappedRows") or (), strict=False)),
                **{name: ask(function) for name, function in PLAIN.items()},
                **{name: int(value) for name, value in self.questions.fields(RECOVERY).items()},
                "sram_threshold_exceeded": self._sram_threshold(),
                "power_cap_watts": watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
                "nvlinks": facts.links(self.questions) or None,
            }
        )

    def processes(self) -> list[dict[str, int]] | None:
        """Those that compute on it; None where that is not told."""
        found = self.questions.ask("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
        return None if found is None else [_process(one) for one in found[:MOST_PROCESSES]]

    def _measured(self, at: float) -> dict[str, float | None]:
        """What takes field values, or two looks."""
        values = self.questions.fields(FAST)
        activity = self._activity.look() if self._activity else {}
        return {
            "memory_temperature_c": values.get("memory_temperature_c"),
            **{f"nvlink_{way}_mib": self._nvlink(way, values, at) for way in ("tx", "rx")},
            **{f"pcie_{way}_mib": self._pcie(way, values, at) for way in ("tx", "rx")},
            **activity,
        }

    def _nvlink(self, way: str, values: dict[str, float], at: float) -> float | None:
        kib = self._rates.of(f"nvlink_{way}_kib", values.get(f"nvlink_{way}_kib"), at)
        counted = self._rates.of(f"nvlink_{way}_bytes", values.get(f"nvlink_{way}_bytes"), at)
        if kib is not None:
            return kib / 2**10
        return None if counted is None else counted / 2**20

    def _pcie(self, way: str, values: dict[str, float], at: float) -> float | None:
        count = values.get(f"pcie_{way}_bytes", 0)
        rate = self._rates.of(f"pcie_{way}_bytes", count if count >= WIDE_COUNTER else None, at)
        return None if rate is None else rate / 2**20

    def _sram_threshold(self) -> int | None:
        """Whether its memory has had more errors than NVIDIA takes a GPU back for."""
        if not hasattr(pynvml, "c_nvmlEccSramErrorStatus_v1_t"):
            return None
        status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
        asked = self.questions.ask("nvmlDeviceGetSramEccErrorStatus", more=(ctypes.byref(status),))
        return None if asked is None else int(status.bThresholdExceeded)


def _process(found: Any) -> dict[str, int]:
    memory, part = found.usedGpuMemory, found.gpuInstanceId
    return told(
        {
            "pid": found.pid,
            "memory_mib": None if memory is None else memory // facts.MIB,
            "gpu_instance": None if part in (None, NO_INSTANCE) else part,
        }
    )
