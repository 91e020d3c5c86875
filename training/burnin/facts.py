"""Describe the machine that is tested: its GPUs, driver and software."""

from __future__ import annotations

import os
import re
import resource
from typing import Any

import numpy  # noqa: F401 (where it is missing, tests of GPUs would fail later, as if the GPUs were at fault)
import torch

from training.burnin.devices import cpu_model
from training.burnin.results import emit, result

MAX_GPUS = 64
DRIVER_FILE = "/proc/driver/nvidia/version"


def emit_facts() -> None:
    """Print the facts. Raises whatever torch raises where the driver cannot be used."""
    emit({"begin": "facts", "item": "this node"})
    gpus: list[dict[str, Any]] = []
    for index in range(min(torch.cuda.device_count(), MAX_GPUS)) if torch.cuda.is_available() else ():
        gpus.append({"index": index, "model": torch.cuda.get_device_properties(index).name})
    emit(
        result("facts", "this node")
        | {
            "gpus": gpus,
            "driver": driver_version(),
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda or ""),
            "cpu": cpu_model(),
            **limits(),
        }  # fmt: skip
    )


def limits() -> dict[str, int]:
    """Return what jobs may use here: locked memory and open files (-1: no limit), and the size of /dev/shm.

    Of open files the hard limit counts, up to which a program may raise its own; of locked memory the soft one.
    """
    found = {
        "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    }
    try:
        shm = os.statvfs("/dev/shm")  # noqa: S108 (only its size)
    except OSError:
        return found
    return found | {"shm_bytes": shm.f_blocks * shm.f_frsize}


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module; "" without one."""
    try:
        with open(DRIVER_FILE, encoding="utf-8", errors="replace") as file:
            found = re.search(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", file.readline())
    except OSError:
        return ""
    return found[1] if found else ""
