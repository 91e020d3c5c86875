"""The machine under a run: its system, processors, memory and GPUs. Each is left out where it cannot be told."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import suppress
from typing import Any

from training.launch.resources import Gpus, open_nvml
from training.units import GIB

TEXT_BYTES = 96  # of any text that NVML gives
MOST_GPUS = 64


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def system() -> dict[str, Any]:
    found = {"kernel": f"{platform.system()} {platform.release()}", "machine": platform.machine()}
    with suppress(OSError):
        found["os"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    return found


def processors() -> dict[str, Any]:
    """The model, and how many of them this process may use. Memory is the machine's, in GiB."""
    found: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    found["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)
    with suppress(OSError), open("/proc/cpuinfo") as file:
        if match := re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", file.read(65_536), re.MULTILINE):
            found["cpu"] = match[1].strip()
    return found


def gpus(visible: str | None) -> dict[str, Any]:
    """Driver, the CUDA that it speaks, and the GPUs that a process with this CUDA_VISIBLE_DEVICES sees (None: all).

    Nothing at all where the machine has no NVML.
    """
    nvml = open_nvml()
    if nvml is None:
        return {}
    found: dict[str, Any] = {"driver": _text(nvml.nvmlSystemGetDriverVersion)}
    cuda = ctypes.c_int()
    if nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)) == 0:
        found["cuda"] = f"{cuda.value // 1000}.{cuda.value % 1000 // 10}"
    count = ctypes.c_uint()
    if visible != "" and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        seen = Gpus(min(count.value, MOST_GPUS), visible or "")
        found["gpus"] = [_gpu(nvml, handle) for handle in seen.handles[:MOST_GPUS]]
    return {name: value for name, value in found.items() if value}


def _gpu(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> dict[str, Any]:
    memory = _Memory()
    told: dict[str, Any] = {"name": _text(nvml.nvmlDeviceGetName, handle)}
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
        told["memory_gib"] = round(memory.total / GIB, 1)
    return told


def _text(function: Any, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(TEXT_BYTES)
    failed = function(*arguments, buffer, ctypes.c_uint(TEXT_BYTES))
    return "" if failed else buffer.value.decode(errors="replace")
