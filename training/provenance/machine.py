"""The machine under a run: its system, processors, memory and GPUs. Each is left out where it cannot be told."""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from typing import Any

from gpus import detection
from gpus.reports import GpuInfo
from training.launch.gpus import gpu_names
from training.units import GIB, MIB

GPU_SECONDS = 10.0  # for a driver that may have to set up its GPUs first


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

    Nothing at all where the machine has no NVML, or where it does not answer.
    """
    machine = detection.detect(gpu_names(0, visible or ""), seconds=GPU_SECONDS)
    if machine is None:
        return {}
    found: dict[str, Any] = {name: told for name in ("driver", "cuda") if (told := getattr(machine, name))}
    gpus = [_about(gpu) for gpu in machine.gpus]
    return {**found, "gpus": gpus} if visible != "" and gpus else found


def _about(gpu: GpuInfo) -> dict[str, Any]:
    told: dict[str, Any] = {"name": gpu.name} if gpu.name else {}
    return {**told, "memory_gib": round(gpu.memory_mib * MIB / GIB, 1)} if gpu.memory_mib is not None else told
