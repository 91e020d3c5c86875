"""The machine under a run: its system, processors, memory and GPUs. Each is left out where it cannot be told."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from typing import Any

from training.launch.gpus import arguments, named
from training.units import GIB

KILLED_SECONDS = 1.0
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
    told = _first_line(named(0, visible or ""))
    found: dict[str, Any] = {name: told[name] for name in ("driver", "cuda") if name in told}
    gpus = [{name: gpu[name] for name in ("name", "memory_gib") if name in gpu} for gpu in told.get("gpus", [])]
    return {**found, "gpus": gpus} if visible != "" and gpus else found


def _first_line(names: list[str]) -> dict[str, Any]:
    """What the GPUs are, as a process of its own tells it, which is not waited for where a driver holds it."""
    reader = subprocess.Popen(arguments(0, names), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        said, _ = reader.communicate(timeout=GPU_SECONDS)
    except subprocess.TimeoutExpired:
        reader.kill()
        with suppress(subprocess.TimeoutExpired):
            reader.communicate(timeout=KILLED_SECONDS)
        return {}
    found: dict[str, Any] = json.loads(said or b"{}")
    return found
