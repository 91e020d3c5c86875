"""Describe the machine: its system, processors, memory and GPUs. What cannot be determined is left out."""

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

GPU_SECONDS = 10.0  # the driver may have to initialise its GPUs first


def system() -> dict[str, Any]:
    facts = {"kernel": f"{platform.system()} {platform.release()}", "machine": platform.machine()}
    with suppress(OSError):
        facts["os"] = platform.freedesktop_os_release()["PRETTY_NAME"]
    return facts


def processors() -> dict[str, Any]:
    """Return the CPU model, how many CPUs this process may use, and the machine's memory in GiB."""
    facts: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    facts["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)
    with suppress(OSError), open("/proc/cpuinfo") as file:
        if match := re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", file.read(65_536), re.MULTILINE):
            facts["cpu"] = match[1].strip()
    return facts


def gpus(visible: str | None) -> dict[str, Any]:
    """Return the driver, its CUDA version, and the GPUs visible with this CUDA_VISIBLE_DEVICES (None: all).

    Returns {} if the machine has no NVML, or if it does not respond.
    """
    machine = detection.detect(gpu_names(0, visible or ""), seconds=GPU_SECONDS)
    if machine is None:
        return {}
    facts: dict[str, Any] = {name: version for name in ("driver", "cuda") if (version := getattr(machine, name))}
    gpus = [_gpu_facts(gpu) for gpu in machine.gpus]
    return {**facts, "gpus": gpus} if visible != "" and gpus else facts


def _gpu_facts(gpu: GpuInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": gpu.name} if gpu.name else {}
    return {**facts, "memory_gib": round(gpu.memory_mib * MIB / GIB, 1)} if gpu.memory_mib is not None else facts
