"""What this machine has: its GPUs, and the memory that may be used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpus import once

GPU_SECONDS = 10.0  # for a driver that may have to set up its GPUs first


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str
    uuid: str = ""
    minor: int | None = None


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver shows, in its order; none where there is no driver, or it does not answer."""
    machine = once.ask(seconds=GPU_SECONDS) if once.has_driver() else None
    gpus = machine.gpus if machine else ()
    return tuple(Gpu(gpu.gpu, gpu.name, gpu.uuid, gpu.minor) for gpu in gpus if gpu.uuid)


def memory_mib() -> int:
    """What the machine has, or what its control group allows if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit) if limit.isdecimal() else total) // (1 << 20)
