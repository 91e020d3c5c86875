"""Open NVML with this node's GPUs and its event set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pynvml
from pynvml import NVMLError

from gpus import facts
from gpus.device import GpuDevice
from gpus.queries import address
from gpus.reports import MAX_GPUS

__all__ = ["NVMLError", "NvmlNode", "may_change"]

LIBRARY_NOT_FOUND = 12
TIMEOUT = 10
KINDS = {0x8: "xid", 0x8000: "recovery", 0x100: "mig", 0x2: "ecc"}


class NvmlNode:
    """The GPUs of this node in NVML. Raises NVMLError if NVML cannot be opened, or must be reopened."""

    def __init__(self, names: list[str], *, detailed: bool) -> None:
        """Open NVML. `names` as in CUDA_VISIBLE_DEVICES; empty: all GPUs."""
        pynvml.nvmlInit()
        names = names or [str(index) for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS))]
        self._devices = [GpuDevice(name) for name in names]
        for device in self._devices:
            device.open()
        self._detailed = detailed
        self._events = self._register_events() if detailed else None
        self._reported: set[tuple[int, str, int]] = set()

    def describe(self) -> dict[str, Any]:
        """Return driver, CUDA version and GPUs."""
        found: dict[str, Any] = {}
        with suppress(NVMLError):
            found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        with suppress(NVMLError):
            found["nvml"] = pynvml.nvmlSystemGetNVMLVersion()
        with suppress(NVMLError):
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        found["gpus"] = [device.describe(detailed=self._detailed) for device in self._devices]
        if self._detailed:
            found["topology"] = facts.topology([device.queries for device in self._devices])
        return found

    def has_changed(self, *, slices: bool) -> bool:
        """Return whether `describe` would differ for a GPU; `slices`: check MIG slices too, which is slower."""
        changed = [device.has_changed(slices=slices) for device in self._devices]
        return any(changed)

    def samples(self) -> list[dict[str, Any]]:
        self._reported.clear()
        at = time.monotonic()
        return [device.sample(at) for device in self._devices]

    def counters(self) -> list[dict[str, Any]]:
        return [device.counters() for device in self._devices]

    def processes(self) -> list[list[dict[str, int]] | None]:
        return [device.processes() for device in self._devices]

    def wait(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Yield events until the deadline (monotonic clock); equal events once between two samples."""
        while (left := deadline - time.monotonic()) > 0:
            if self._events is None:
                time.sleep(left)
                return
            try:
                # At least a millisecond: with 0 the loop would spin.
                nvml_event = pynvml.nvmlEventSetWait_v2(self._events, max(1, int(left * 1000)))
            except NVMLError as error:
                if error.value != TIMEOUT:  # one lost GPU makes the call fail for all of them
                    time.sleep(max(0.0, deadline - time.monotonic()))
                continue
            if event := self._event(nvml_event):
                yield event

    def _event(self, nvml_event: Any) -> dict[str, Any] | None:
        indices = [
            index
            for index, device in enumerate(self._devices)
            if address(device.queries.handle) == address(nvml_event.device)
        ]
        kind = KINDS.get(nvml_event.eventType)
        if not indices or kind is None:
            return None
        key = (indices[0], kind, int(nvml_event.eventData))
        if key in self._reported:
            return None
        self._reported.add(key)
        return {"place": key[0], "kind": key[1], "value": key[2]}

    def _register_events(self) -> Any:
        """Register for the events that these GPUs support; None if none of them supports any."""
        with suppress(NVMLError):
            events, registered = pynvml.nvmlEventSetCreate(), 0
            for device in self._devices:
                kinds = device.queries.first_available("nvmlDeviceGetSupportedEventTypes") or 0
                if wanted := kinds & sum(KINDS):
                    with suppress(NVMLError):
                        pynvml.nvmlDeviceRegisterEvents(device.queries.handle, wanted, events)
                        registered += 1
            return events if registered else None
        return None


def may_change(error: NVMLError) -> bool:
    """Return whether NVML may become available later: a driver may be loaded, a missing library will not appear."""
    return int(error.value) != LIBRARY_NOT_FOUND
