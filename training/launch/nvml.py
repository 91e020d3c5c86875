"""Reads this node's GPUs by NVIDIA's library (NVML), in a process of its own, since a call may never return.

    python -P -m training.launch.nvml SECONDS [GPU …]

Each GPU is named as in CUDA_VISIBLE_DEVICES, by index or UUID; with none, all are meant. What it tells are lines of
JSON: first what the GPUs are, then every SECONDS what they do; with 0 seconds it ends after the first line. A machine
without NVML, or without a driver that answers, ends it with one line that says why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml
from pynvml import NVMLError

from training.units import GIB

LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
REOPENED = (pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
MOST_GPUS = 64


class Gpu:
    """One GPU. What names it is asked for once: a lost GPU tells neither its UUID nor its place on the bus."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handle: Any = None
        self.is_lost = False
        self._known: dict[str, Any] = {}

    def open(self) -> None:
        """Ask for the handle, again after NVML was opened again: it is good for one opening."""
        by_index = self.name.isdecimal()
        found = pynvml.nvmlDeviceGetHandleByIndex if by_index else pynvml.nvmlDeviceGetHandleByUUID
        self._handle = None
        self._handle = self._ask(found, int(self.name) if by_index else self.name)

    def about(self) -> dict[str, Any]:
        if self._handle is not None and not self._known:
            pci, memory = self._ask(pynvml.nvmlDeviceGetPciInfo, self._handle), self._memory()
            told = {
                "name": self._ask(pynvml.nvmlDeviceGetName, self._handle),
                "uuid": self._ask(pynvml.nvmlDeviceGetUUID, self._handle),
                "bus": pci.busId if pci else None,
                "memory_gib": round(memory.total / GIB, 1) if memory else None,
            }
            self._known = {name: value for name, value in told.items() if value is not None}
        return {"gpu": self.name, **self._known}

    def look(self) -> dict[str, Any]:
        """What it does now; what it does not tell is left out: a slice (MIG) knows neither its use nor its power."""
        if self._handle is None:
            return {"lost": True} if self.is_lost else {}
        self.is_lost = False
        use, memory = self._ask(pynvml.nvmlDeviceGetUtilizationRates, self._handle), self._memory()
        milliwatts = self._ask(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        if self.is_lost:
            return {"lost": True}
        told = {
            "percent": use.gpu if use else None,
            "memory_gib": memory.used / GIB if memory else None,
            "watts": milliwatts / 1000 if milliwatts is not None else None,
        }
        return {name: value for name, value in told.items() if value is not None}

    def _memory(self) -> Any:
        return self._ask(pynvml.nvmlDeviceGetMemoryInfo, self._handle)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Its answer, or None where it tells nothing."""
        try:
            return function(*arguments)
        except NVMLError as error:
            if error.value in REOPENED:
                raise
            self.is_lost = self.is_lost or error.value in LOST
            return None


def open_all(names: list[str]) -> list[Gpu]:
    """NVML, opened, and the GPUs. Raises NVMLError where there is none to ask."""
    pynvml.nvmlInit()
    gpus = [Gpu(name) for name in names or map(str, range(min(pynvml.nvmlDeviceGetCount(), MOST_GPUS)))]
    for gpu in gpus:
        gpu.open()
    return gpus


def about(gpus: list[Gpu]) -> dict[str, Any]:
    """The driver, the CUDA that it speaks, and the GPUs."""
    told: dict[str, Any] = {}
    with suppress(NVMLError):
        told["driver"] = pynvml.nvmlSystemGetDriverVersion()
    with suppress(NVMLError):
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        told["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    return {**told, "gpus": [gpu.about() for gpu in gpus]}


def look(gpus: list[Gpu]) -> list[dict[str, Any]]:
    """What each does. After a reset, or where the driver was loaded anew, NVML is opened once more."""
    try:
        return [gpu.look() for gpu in gpus]
    except NVMLError:
        with suppress(NVMLError):
            pynvml.nvmlShutdown()
        with suppress(NVMLError):
            pynvml.nvmlInit()
            for gpu in gpus:
                gpu.open()
        return [{} for _ in gpus]


def main(arguments: list[str]) -> int:
    seconds, names = float(arguments[0]), arguments[1:]
    try:
        gpus = open_all(names)
    except NVMLError as error:
        tell({"none": str(error)})
        return 0
    tell(about(gpus))
    while seconds:
        # Python's clock is the system's own: whoever reads this can tell how old it is.
        tell({"at": time.monotonic(), "looks": look(gpus)})
        time.sleep(seconds)
    return 0


def tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:
        code = 0
    # NVIDIA's library has something to do when a process ends in good order, too.
    os._exit(code)
