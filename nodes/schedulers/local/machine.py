"""Detect this machine's GPUs and its usable memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpus import detection

GPU_SECONDS = 10.0  # the driver may have to initialise its GPUs first


@dataclass(frozen=True)
class LocalGpu:
    index: str
    name: str
    uuid: str = ""
    minor: int | None = None


def find_gpus() -> tuple[LocalGpu, ...]:
    """Return the GPUs that the driver lists, in its order; none if there is no driver or it does not respond."""
    machine = detection.detect(seconds=GPU_SECONDS) if detection.has_driver() else None
    gpus = machine.gpus if machine else ()
    return tuple(LocalGpu(gpu.gpu, gpu.name, gpu.uuid, gpu.minor) for gpu in gpus if gpu.uuid)


def memory_mib() -> int:
    """Return the machine's memory, or its control group's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit) if limit.isdecimal() else total) // (1 << 20)
