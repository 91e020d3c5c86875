"""Name the software that a device's results depend on, and wait for GPUs: shared by the tests of devices."""

from __future__ import annotations

import platform

import torch


def basis(device: torch.device) -> str:
    """Return what must be equal for two devices to compute equal bits."""
    if device.type == "cpu":
        return f"{cpu_model()}, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}"


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
