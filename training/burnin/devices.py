"""Name the software that a device's results depend on, and wait for GPUs: shared by the tests of devices."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import torch


def basis(device: torch.device) -> str:
    """Return what must be equal for two devices to compute equal bits, and about equally fast."""
    if device.type == "cpu":
        return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()}), torch {torch.__version__}"
    software = f"torch {torch.__version__}, CUDA {torch.version.cuda}, cuBLAS {cublas_version()}"
    return f"{torch.cuda.get_device_name(device)}, {software}"


@cache
def cublas_version() -> str:
    """Return the version of the cuBLAS that this process loaded: it may be updated without CUDA or torch."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            path = next(line.split(maxsplit=5)[5].strip() for line in file if "/libcublasLt.so" in line)
        version = ctypes.CDLL(path).cublasLtGetVersion
    except (OSError, StopIteration, AttributeError):
        return "unknown"
    version.restype = ctypes.c_size_t
    return str(version())


def cpu_model() -> str:
    """Return the processor's name as the kernel reports it, else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.machine()


def synchronize(*devices: torch.device) -> None:
    """Wait until the GPUs among these devices have done what was queued."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
