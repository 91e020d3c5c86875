"""What this machine has: its GPUs, and the memory that may be used."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    index: str
    name: str


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that the driver shows; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = (line.split(",", 1) for line in answer.splitlines() if "," in line)
    return tuple(Gpu(index.strip(), name.strip()) for index, name in lines)


def memory_mib() -> int:
    """What the machine has, or what its control group allows if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return min(total, int(limit) if limit.isdecimal() else total) // (1 << 20)
